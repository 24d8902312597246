-- Eight photos in twelve widths.
INSERT INTO workflow_run (type, payload)
SELECT 'media.thumbnail.v1',
       jsonb_build_object('image', 'photo-' || n || CASE WHEN n % 2 = 0 THEN '.png' ELSE '.jpg' END, 'width', width)
FROM generate_series(1, 8) AS n, generate_series(100, 650, 50) AS width;

-- Invoices of orders that came in other ways.
INSERT INTO workflow_run (type, payload)
SELECT 'billing.invoice_charge.v1', jsonb_build_object('order', gen_random_uuid(), 'cents', 100 * n)
FROM generate_series(1, 150) AS n;

-- A report for each day of a month, and a few more runs.
INSERT INTO workflow_run (type, payload)
SELECT 'report.sales.v1', jsonb_build_object('day', to_char(day, 'YYYY-MM-DD'))
FROM generate_series(timestamp '2026-02-01', '2026-02-28', '1 day') AS day;

INSERT INTO workflow_run (type)
SELECT 'default.noop.v1'
FROM generate_series(1, 20);
