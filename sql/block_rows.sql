-- purpose: whether there are rows of residual blocks from training, and of test examples
-- in: relation blocks (test_id)
-- out: probed, count
SELECT
    test_id <> -1 AS probed,
    count(*) AS count
FROM blocks
GROUP BY probed
ORDER BY probed
