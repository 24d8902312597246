package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// createTable creates the table of chaos.effect, even if several processes try at the same time, and waits for a
// database that does not exist yet. If keep is less than a minute, it also drops the CHECK that forbids such a short
// retention, which only the owner of the tables can do, unless the owner has dropped it before.
func createTable(ctx context.Context, pool *pgxpool.Pool, log *slog.Logger, keep time.Duration) error {
	for {
		err := pgx.BeginFunc(ctx, pool, createIn(ctx, keep > 0 && keep < time.Minute))
		if err == nil || ctx.Err() != nil {
			return nil
		}
		log.Warn("cannot create table chaos_effect; trying again", "err", err)
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

func createIn(ctx context.Context, forShort bool) func(pgx.Tx) error {
	return func(tx pgx.Tx) error {
		// Without the lock, two processes may both find the table missing, and one of them fails.
		if _, err := tx.Exec(ctx, `
			SELECT pg_advisory_xact_lock(hashtextextended('chaos_effect ' || current_schema(), 0))`); err != nil {
			return err
		}
		if forShort {
			if _, err := tx.Exec(ctx, `
				DO $do$ BEGIN
					IF EXISTS (SELECT FROM pg_constraint WHERE conrelid = 'workflow_retention'::regclass AND conname = 'workflow_retention_period_check') THEN
						ALTER TABLE workflow_retention DROP CONSTRAINT workflow_retention_period_check;
					END IF;
				END $do$`); err != nil {
				return err
			}
		}
		// No constraint prevents duplicate effects, because tests have to be able to see them.
		_, err := tx.Exec(ctx, `
			CREATE TABLE IF NOT EXISTS chaos_effect (
				run_id   uuid        NOT NULL,
				lease_no bigint      NOT NULL,
				key      text        NOT NULL,
				at       timestamptz NOT NULL DEFAULT clock_timestamp(),
				-- Of steps of processes: what the process was told it is, which node of it, and, of
				-- what undoes a step, the run that is undone.
				tag      text,
				node     text,
				undoes   uuid
			)`)
		return err
	}
}
