-- purpose: the recorded test examples of every layer; of a test_id probed twice both rows
-- in: $files, the parts of probes/layer=*, $mixed, whether their columns differ; relation tasks (task, name)
-- out: layer, test_id, position, step, label, task, predicted, x, y, since format 2 g, token; null where the layer has none
SELECT
    -- Not hive_partitioning: a folder above the store may be called `step=1`.
    CAST(regexp_extract(part.filename, 'layer=([0-9]+)[/\\][^/\\]*$', 1) AS INTEGER) AS layer,
    part.test_id,
    part.position,
    part.step,
    part.label,
    tasks.name AS task,
    part.predicted,
    part.x,
    part.* EXCLUDE (filename, test_id, position, step, label, task, predicted, x, token),
    part.token
FROM (
    SELECT * FROM read_parquet($files, filename = true, hive_partitioning = false, union_by_name = $mixed)
    UNION ALL BY NAME
    SELECT CAST(NULL AS FLOAT[]) AS x, CAST(NULL AS INTEGER) AS token WHERE false
) AS part
LEFT JOIN tasks ON tasks.task = part.task
