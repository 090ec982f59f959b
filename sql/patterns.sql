-- purpose: every recorded pattern of every layer, with its epoch and the name of its task
-- in: $files, the parts of patterns/layer=*; relations epochs (step, epoch) and tasks (task, name)
-- out: layer, step, epoch, sample_id, position, label, task, x, e
SELECT
    CAST(part.layer AS INTEGER) AS layer,
    part.step,
    epochs.epoch,
    part.sample_id,
    part.position,
    part.label,
    tasks.name AS task,
    part.x,
    part.e
FROM read_parquet($files, hive_partitioning = true) AS part
LEFT JOIN epochs ON epochs.step = part.step
LEFT JOIN tasks ON tasks.task = part.task
