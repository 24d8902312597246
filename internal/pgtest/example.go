package pgtest

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Example is New for examples, which have no testing.TB. Failures panic, and done drops the database.
func Example() (ctx context.Context, pool *pgxpool.Pool, done func()) {
	e := &example{}
	pool = New(e)
	return e.Context(), pool, func() {
		for i := len(e.cleanups) - 1; i >= 0; i-- {
			e.cleanups[i]()
		}
	}
}

type example struct {
	testing.TB
	cleanups []func()
}

func (*example) Helper()                           {}
func (*example) Context() context.Context          { return context.Background() }
func (e *example) Cleanup(f func())                { e.cleanups = append(e.cleanups, f) }
func (*example) Fatal(args ...any)                 { panic(fmt.Sprint(args...)) }
func (*example) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (*example) Errorf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
