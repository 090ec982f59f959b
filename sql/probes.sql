-- purpose: the recorded test examples of every layer; of a test_id probed twice both rows
-- in: $files, the parts of probes/layer=*; relation tasks (task, name)
-- out: layer, test_id, position, step, label, task, predicted, x, y
SELECT
    CAST(part.layer AS INTEGER) AS layer,
    part.test_id,
    part.position,
    part.step,
    part.label,
    tasks.name AS task,
    part.predicted,
    part.x,
    part.y
FROM read_parquet($files, hive_partitioning = true) AS part
LEFT JOIN tasks ON tasks.task = part.task
