-- purpose: every recorded pattern of every layer, with its epoch and the name of its task
-- in: $files, the parts of patterns/layer=*, $mixed, whether their columns differ, $last, the last step that counts; relations epochs (step, epoch) and tasks (task, name)
-- out: layer, step, epoch, sample_id, position, label, task, slot, duplicate, x as stored, e the error (times its scale), token; null where the layer has no such column
SELECT
    -- Not hive_partitioning: a folder above the store may be called `step=1`.
    CAST(regexp_extract(part.filename, 'layer=([0-9]+)[/\\][^/\\]*$', 1) AS INTEGER) AS layer,
    part.step,
    epochs.epoch,
    part.sample_id,
    part.position,
    part.label,
    tasks.name AS task,
    part.slot,
    part.duplicate,
    part.x,
    CASE WHEN part.scale IS NULL THEN part.e ELSE [CAST(part.scale * value AS FLOAT) FOR value IN part.e] END AS e,
    part.token
FROM (
    SELECT * FROM read_parquet($files, filename = true, hive_partitioning = false, union_by_name = $mixed)
    UNION ALL BY NAME
    SELECT
        CAST(NULL AS INTEGER) AS slot,
        CAST(NULL AS INTEGER) AS duplicate,
        CAST(NULL AS FLOAT[]) AS x,
        CAST(NULL AS FLOAT[]) AS e,
        CAST(NULL AS FLOAT) AS scale,
        CAST(NULL AS INTEGER) AS token
    WHERE false
) AS part
LEFT JOIN epochs ON epochs.step = part.step
LEFT JOIN tasks ON tasks.task = part.task
WHERE part.step <= $last
