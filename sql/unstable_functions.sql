-- purpose: functions whose value changes from one call or statement to the next, whatever their arguments
-- in: names, the functions to look at
-- out: function_name
SELECT function_name
FROM duckdb_functions()
WHERE list_contains($names, function_name)
GROUP BY function_name
HAVING bool_and(coalesce(stability, 'CONSISTENT') <> 'CONSISTENT')
ORDER BY function_name
