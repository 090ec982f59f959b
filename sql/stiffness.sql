-- purpose: how stiff the trajectories of each step are, in all and at thresholds M = (m1, m2)
-- in: relation indexed (step, rank, test_id, sample_id, slot, nsi), of blocks that have an index alone; lists $m1 and $m2
-- out: step, trajectories, nsi, tns, m1, m2, stiff (share of trajectories with a stiff block), ratio (mean share of stiff blocks)
WITH trajectories AS (
    -- What one sample goes through at one step.
    SELECT step, rank, test_id, sample_id, slot, favg(nsi) AS mean, max(nsi) AS highest, count(*) AS blocks
    FROM indexed
    GROUP BY step, rank, test_id, sample_id, slot
),
thresholds AS (
    SELECT m1, m2
    FROM (SELECT unnest($m1) AS m1)
    CROSS JOIN (SELECT unnest($m2) AS m2)
),
judged AS (
    SELECT
        step, rank, test_id, sample_id, slot, m1, m2, mean, highest, blocks,
        count(*) FILTER (WHERE nsi >= greatest(mean * (1 + m1), m2)) AS found
    FROM indexed
    JOIN trajectories USING (step, rank, test_id, sample_id, slot)
    CROSS JOIN thresholds
    GROUP BY ALL
)
SELECT
    step,
    count(*) AS trajectories,
    favg(mean) AS nsi,
    -- The integral of P(highest >= max(mean (1 + m1), m2)) over all m1, m2 >= 0: an area for each trajectory.
    favg(CASE WHEN mean > 0 THEN highest * (highest / mean - 1) ELSE 0 END) AS tns,
    m1,
    m2,
    favg(CASE WHEN found > 0 THEN 1 ELSE 0 END) AS stiff,
    favg(found / blocks) AS ratio
FROM judged
GROUP BY step, m1, m2
ORDER BY step, m1, m2
