-- The tables of the shop itself: what customers ordered, and what they were charged.
CREATE TABLE IF NOT EXISTS shop_order (
    id         uuid        PRIMARY KEY,
    customer   text        NOT NULL,
    cents      bigint      NOT NULL CHECK (cents > 0),
    ordered_at timestamptz NOT NULL DEFAULT now(),
    paid_at    timestamptz
);

-- The key of an entry is the id of the run that booked it.
CREATE TABLE IF NOT EXISTS shop_ledger (
    entry     uuid        PRIMARY KEY,
    order_id  uuid        NOT NULL,
    cents     bigint      NOT NULL CHECK (cents > 0),
    booked_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
