-- purpose: what a person wants to see of training samples
-- in: $files, the parts of samples/; relation tasks (task, name)
-- out: sample_id, task, label, payload, mime
SELECT
    part.sample_id,
    tasks.name AS task,
    part.label,
    part.payload,
    part.mime
FROM read_parquet($files, hive_partitioning = false) AS part
LEFT JOIN tasks ON tasks.task = part.task
