-- The tables of the departments. The key of a row is the id of the run that made it, so that an undo step finds what
-- its step did, and a repeated attempt does nothing twice.
CREATE TABLE IF NOT EXISTS order_stock (
    item text    PRIMARY KEY,
    free integer NOT NULL CHECK (free >= 0)
);

CREATE TABLE IF NOT EXISTS order_reservation (
    run      uuid    PRIMARY KEY,
    order_id text    NOT NULL,
    item     text    NOT NULL REFERENCES order_stock,
    pieces   integer NOT NULL CHECK (pieces > 0),
    released boolean NOT NULL DEFAULT false
);

CREATE TABLE IF NOT EXISTS order_payment (
    run      uuid    PRIMARY KEY,
    order_id text    NOT NULL,
    cents    bigint  NOT NULL CHECK (cents > 0),
    refunded boolean NOT NULL DEFAULT false
);

CREATE TABLE IF NOT EXISTS order_parcel (
    run      uuid    PRIMARY KEY,
    order_id text    NOT NULL,
    unpacked boolean NOT NULL DEFAULT false
);

CREATE TABLE IF NOT EXISTS order_label (
    run      uuid    PRIMARY KEY,
    order_id text    NOT NULL,
    png      bytea   NOT NULL,
    void     boolean NOT NULL DEFAULT false
);

CREATE TABLE IF NOT EXISTS order_letter (
    run      uuid    PRIMARY KEY,
    order_id text    NOT NULL
);

INSERT INTO order_stock VALUES ('cup', 1000), ('plate', 1000), ('vase', 1000), ('teapot', 0)
ON CONFLICT DO NOTHING;
