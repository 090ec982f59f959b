-- purpose: the mean stiffness index of each block at each step
-- in: relation indexed (step, block, name, nsi), without blocks that have no index
-- out: step, block, name, nsi, count
SELECT
    step,
    block,
    name,
    favg(nsi) AS nsi,
    count(*) AS count
FROM indexed
GROUP BY step, block, name
ORDER BY step, block
