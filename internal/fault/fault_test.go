package fault_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/simple-workflow/simple-workflow/internal/fault"
	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// states returns SQLSTATEs: each possible first three characters with some endings, each code that the rule names, and
// all codes that differ from such a code in one character. The empty string stands for an error without an SQLSTATE.
func states() (all []string) {
	const letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	for _, a := range letters {
		for _, b := range letters {
			for _, c := range letters {
				for _, rest := range []string{"00", "01", "03", "04", "06", "14", "ZZ"} {
					all = append(all, string([]rune{a, b, c})+rest)
				}
			}
		}
	}
	for _, named := range []string{"25006", "53100", "53300", "26000", "42P05", "0A000", "55P03", "53200", "53400", "57014", "25P03", "25P04", "P0001", "P0004", "XX777", "57P01", "2200H"} {
		for i := range named {
			for _, c := range letters {
				all = append(all, named[:i]+string(c)+named[i+1:])
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(append([]string{""}, all...))
}

// The rules of the database and of the programs agree for each SQLSTATE.
func TestOneRule(t *testing.T) {
	pool := pgtest.New(t)
	names := map[fault.Remedy]string{fault.Again: "again", fault.Anew: "anew", fault.PassOver: "pass over", fault.Fewer: "fewer", fault.Halve: "halve"}
	all := states()
	rows, _ := pool.Query(t.Context(), `SELECT workflow_remedy(s) FROM unnest($1::text[]) WITH ORDINALITY AS x (s, n) ORDER BY n`, all)
	there, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(there) != len(all) {
		t.Fatalf("%d of %d, %v", len(there), len(all), err)
	}
	seen := map[string]int{}
	for i, state := range all {
		if here := names[fault.OfState(state)]; here != there[i] {
			t.Errorf("SQLSTATE %q: %q here, %q in the database", state, here, there[i])
		}
		seen[there[i]]++
	}
	if len(seen) != len(names) {
		t.Errorf("remedies are %v", seen)
	}
	if n := len(all); n < 300_000 {
		t.Errorf("only %d SQLSTATEs were compared", n)
	}
}

// Each SQLSTATE has its intended remedy. The list is repeated here, because the two rules that TestOneRule
// compares could be wrong together.
func TestRemedies(t *testing.T) {
	for states, want := range map[string]fault.Remedy{
		"08000 08006 08P01 25006 28000 28P01 3D000 3F000 40001 40P01 53100 53300 57P01 57P02 57P03 57P04 57P05 58000 58030": fault.Again,
		"26000 42P05":                   fault.Anew,
		"55P03":                         fault.PassOver,
		"53200 53400 57014 25P03 25P04": fault.Fewer,
		"22003 2200H 23514 23505 25001 25P02 2D000 3B001 42501 42883 42P01 53000 54000 55000 57000 P0001 P0004 XX000 XX001 XX777 0A000 F0000 HV000": fault.Halve,
	} {
		for state := range strings.FieldsSeq(states) {
			if got := fault.Of(fmt.Errorf("lease: %w", &pgconn.PgError{Code: state})); got != want {
				t.Errorf("SQLSTATE %s: %d, want %d", state, got, want)
			}
		}
	}
	for err, want := range map[error]fault.Remedy{nil: fault.None, errors.New("EOF"): fault.Again, context.DeadlineExceeded: fault.Again,
		&pgconn.PgError{Code: "0A000", Routine: "RevalidateCachedQuery"}: fault.Anew} {
		if got := fault.Of(err); got != want {
			t.Errorf("%v: %d, want %d", err, got, want)
		}
	}
}

// An unusable plan is recognized by the error of PostgreSQL after a table was altered.
func TestPlanMadeAnew(t *testing.T) {
	pool := pgtest.New(t)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	if _, err := conn.Exec(t.Context(), `CREATE TABLE altered (a int)`); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Conn().Prepare(t.Context(), "look", `SELECT * FROM altered`); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), `ALTER TABLE altered ADD b int`); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), "look"); fault.Of(err) != fault.Anew {
		t.Errorf("%v: %d", err, fault.Of(err))
	}
}

// A statement that fails as a whole is halved only after a minute, however often it is repeated. One success
// ends the series. A failure to reach a server is never a row's fault, and ends the series too.
func TestSeries(t *testing.T) {
	var s fault.Series
	deadlock, refused := &pgconn.PgError{Code: "40P01"}, &pgconn.PgError{Code: "XX777"}
	expect := func(err error, want fault.Remedy, lasting bool) {
		t.Helper()
		if first, long := s.Of(err); first != want || long != lasting {
			t.Errorf("%v: %d, lasting %v; want %d, %v", err, first, long, want, lasting)
		}
	}
	expect(deadlock, fault.Again, false)
	expect(refused, fault.Halve, false)
	s.Age(2 * fault.Patience)
	expect(deadlock, fault.Halve, true)
	expect(&pgconn.PgError{Code: "55P03"}, fault.PassOver, true)
	expect(fmt.Errorf("poll: %w", &pgconn.ConnectError{}), fault.Again, false)
	expect(deadlock, fault.Again, false)
	s.Age(2 * fault.Patience)
	expect(deadlock, fault.Halve, true)
	expect(nil, fault.None, false)
	expect(deadlock, fault.Again, false)
}

// A table stands for the rows that the statements of these tests change. It says which rows are refused, and which
// statements fail.
type table struct {
	refuses map[int]string // SQLSTATEs
	locked  map[int]bool
	broken  string // the SQLSTATE of every statement
	done    map[int]bool
	calls   int
	each    func(call int)
}

func (d *table) statement() fault.Statement[int] {
	fail := func(state string) error {
		if state == "" {
			return nil
		}
		return &pgconn.PgError{Code: state}
	}
	return fault.Statement[int]{
		Name: "settle",
		Do: func(_ context.Context, rows []int) error {
			d.calls++
			if d.each != nil {
				d.each(d.calls)
			}
			if d.broken != "" {
				return fail(d.broken)
			}
			for _, r := range rows {
				if d.refuses[r] != "" {
					return fail(d.refuses[r])
				}
			}
			for _, r := range rows {
				d.done[r] = true
			}
			return nil
		},
		Free:    func(_ context.Context, r int) (bool, error) { return !d.locked[r], nil },
		Control: func(context.Context) error { return fail(d.broken) },
	}
}

func upTo(n int) (rows []int) {
	for i := range n {
		rows = append(rows, i)
	}
	return rows
}

func rowsOf(refused []fault.Refusal[int]) (rows []int) {
	for _, r := range refused {
		rows = append(rows, r.Row)
	}
	return rows
}

// A refused row is found, whatever its SQLSTATE, and all other rows are changed. The number of statements grows
// with the number of refused rows.
func TestApart(t *testing.T) {
	for _, bad := range [][]int{{0}, {99}, {50}, {3, 4}, {0, 33, 66, 99}, {}} {
		d := &table{refuses: map[int]string{}, done: map[int]bool{}}
		for _, r := range bad {
			d.refuses[r] = "XX777"
		}
		refused, err := d.statement().Apart(t.Context(), upTo(100), &pgconn.PgError{Code: "XX777"}, false)
		if err != nil || !slices.Equal(rowsOf(refused), bad) && len(bad) > 0 || len(d.done) != 100-len(bad) || d.calls > 3+18*len(bad) {
			t.Errorf("%v: %v refused, %v; %d are done by %d statements", bad, rowsOf(refused), err, len(d.done), d.calls)
		}
	}
}

// With anyCode, an SQLSTATE of passing trouble may be an answer about a row too, and a row that alone raises it
// is found. If the control fails with it, it is the statement's error. An error without an SQLSTATE is still
// trouble.
func TestApartWithAnyCode(t *testing.T) {
	deadlock := &pgconn.PgError{Code: "40P01"}
	d := &table{refuses: map[int]string{3: "40001", 77: "57P01"}, done: map[int]bool{}}
	if refused, err := d.statement().Apart(t.Context(), upTo(100), deadlock, true); err != nil || !slices.Equal(rowsOf(refused), []int{3, 77}) || len(d.done) != 98 {
		t.Errorf("%v refused, %v; %d are done", rowsOf(refused), err, len(d.done))
	}
	d = &table{broken: "40001", done: map[int]bool{}}
	var statement *fault.Error
	if refused, err := d.statement().Apart(t.Context(), upTo(8), deadlock, true); len(refused) > 0 || !errors.As(err, &statement) {
		t.Errorf("%v refused, %v", rowsOf(refused), err)
	}
	d = &table{done: map[int]bool{}}
	for _, away := range []error{errors.New("EOF"), &pgconn.ConnectError{}} {
		if refused, err := d.statement().Apart(t.Context(), upTo(8), away, true); len(refused) > 0 || err != away || d.calls > 0 {
			t.Errorf("%v refused, %v", rowsOf(refused), err)
		}
	}
}

// An error that also occurs for the control is the statement's, and no row is blamed: whether it occurs from
// the beginning, from some statement on, or up to some statement. An error of the server is returned unchanged.
// Locked rows are passed over.
func TestNoRowIsBlamed(t *testing.T) {
	cause := &pgconn.PgError{Code: "42P01"}
	for begins := range 12 {
		for ends := begins + 1; ends < 30; ends++ {
			d := &table{done: map[int]bool{}}
			d.each = func(call int) {
				if d.broken = ""; begins <= call && call < ends {
					d.broken = "42P01"
				}
			}
			d.each(0)
			refused, err := d.statement().Apart(t.Context(), upTo(8), cause, false)
			var statement *fault.Error
			if len(refused) > 0 || err != nil && (!errors.As(err, &statement) || statement.Statement != "settle") {
				t.Errorf("broken from statement %d to %d: %v are refused, %v", begins, ends, rowsOf(refused), err)
			}
		}
	}
	d := &table{done: map[int]bool{}, refuses: map[int]string{3: "40001"}}
	refused, err := d.statement().Apart(t.Context(), upTo(8), cause, false)
	if statement := (*fault.Error)(nil); len(refused) > 0 || err == nil || errors.As(err, &statement) {
		t.Errorf("a deadlock: %v are refused, %v", refused, err)
	}
	d = &table{done: map[int]bool{}, refuses: map[int]string{3: "55P03", 5: "XX777"}, locked: map[int]bool{5: true}}
	if refused, err := d.statement().Apart(t.Context(), upTo(8), cause, false); err != nil || len(refused) > 0 || len(d.done) != 6 {
		t.Errorf("locked: %v are refused, %v; %d are done", refused, err, len(d.done))
	}
	if err := fault.OfStatement("lease", cause); !regexp.MustCompile("^lease fails for every row: ").MatchString(err.Error()) {
		t.Error(err)
	}
}
