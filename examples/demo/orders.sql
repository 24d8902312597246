-- A hundred orders. Every tenth card is declined, every tenth vase breaks when it is packed, and the bank is
-- sometimes busy. One order is so large that a person has to agree.
INSERT INTO workflow_run (type, payload)
SELECT 'graph.start.v1', jsonb_build_object('process', 'order', 'key', 'o-' || n, 'input', jsonb_build_object(
           'order', 'o-' || n,
           'item', CASE WHEN n % 10 = 3 THEN 'vase' WHEN n % 3 = 0 THEN 'plate' ELSE 'cup' END,
           'pieces', 1 + n % 3,
           'card', CASE n % 10 WHEN 7 THEN 'declined' WHEN 5 THEN 'busy' ELSE 'good' END,
           'cents', CASE n WHEN 50 THEN 250000 ELSE 400 + 100 * n END))
FROM generate_series(1, 100) AS n;
