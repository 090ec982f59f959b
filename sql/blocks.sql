-- purpose: what every residual block did to every sample, in training and to test examples, with its name and stiffness index
-- in: $files, the parts of blocks/, $last, the last step that counts; relations tasks (task, name) and block_names (block, name)
-- out: step, block, name, sample_id, test_id, slot, label, task, norm, change, increment, nsi (NaN where the shape changes), rank
SELECT
    part.step,
    part.block,
    block_names.name,
    part.sample_id,
    part.test_id,
    part.slot,
    part.label,
    tasks.name AS task,
    part.norm,
    part.change,
    part.increment,
    part.increment / part.norm AS nsi,
    CAST(regexp_extract(part.filename, 'part-([0-9]+)-[0-9]+[.]parquet$', 1) AS INTEGER) AS rank
FROM read_parquet($files, filename = true, hive_partitioning = false) AS part
LEFT JOIN tasks ON tasks.task = part.task
LEFT JOIN block_names ON block_names.block = part.block
WHERE
    -- A test example is seen after some steps, before the next one.
    part.step <= $last + CASE WHEN part.test_id = -1 THEN 0 ELSE 1 END
