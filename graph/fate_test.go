package graph_test

import (
	"bytes"
	"context"
	"errors"
	"hash/fnv"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/simple-workflow/simple-workflow/internal/pgtest"
)

// With GRAPH_MORTAL=seed the workers of all sites are disturbed while they move instances. Their connections break
// between two statements of a transaction, or before the answer to a statement, perhaps a commit, is read. One worker
// of each site dies at such a place, with everything it has leased. The claims of the tests must hold all the same.

// undisturbed lists the tests that a cut would change, with the reason. Their workers are not disturbed.
var undisturbed = map[string]string{
	"TestBranchDoneAgain":                 "it kills its worker itself, and counts the attempts",
	"TestZombieArrival":                   "it kills its worker itself, and counts the attempts",
	"TestUndoWhatNobodyHeardOf":           "it kills its worker itself, and counts the attempts",
	"TestUndoAfterCrash":                  "it kills its worker itself, and counts the attempts",
	"TestSecondEngine":                    "it counts the attempts",
	"TestTokenStates":                     "what it looks at lasts for a moment",
	"TestStepThatIsPaused":                "a lease that is lost while its instance is paused is not taken again",
	"TestTriedAgain":                      "it counts the attempts",
	"TestEachKeepsItsList":                "what it is about has to happen within half a second",
	"TestStepsAreCarriedOn":               "it counts the leases that are given back",
	"TestCarriedStepKnowsWhatALeaseKnows": "it counts the calls of its handler",
	"TestPauseStopsAChain":                "it counts the attempts",
	"TestStopEndsAChain":                  "it counts the attempts",
	"TestCodesOfIncidents":                "it counts the attempts",
	"TestEdgesTakeTechnicalErrors":        "it counts the attempts",
	"TestFailure":                         "what it is about has to happen within half a second",
	"TestUndoWhatWasRunning":              "what it is about has to happen within a second",
	"TestThrowWaitsForCalled":             "what it is about has to happen within a second",
	"TestTerminate":                       "what it is about has to happen within half a second",
	"TestRoundTrips":                      "it counts what is sent",
	"TestCarriedOnByALostCommit":          "it breaks the connections itself",
	"TestUndoInReverseOrder":              "a step that is done again is done later: the order is another one",
}

// immortal lists the tests whose workers do not die: a run that a dead worker has leased is charged an attempt, or done
// again, and they count these. A broken connection must not show there.
var immortal = map[string]bool{
	"TestStartsWithAnotherInputAtOnce": true,
	"TestStartWithAnotherInput":        true,
	"TestInsertedBeforeItStarts":       true,
	"TestInsertStarts":                 true,
	"TestInstanceThatRefuses":          true,
	"TestTokenThatIsGone":              true,
	"TestRefusedSignalsLeaveSlots":     true,
	"TestRetryOfWhatIsKept":            true,
	"TestHistory":                      true,
}

const (
	cutsOfSite = 5  // cuts in one test, so that it ends
	cutsApart  = 24 // the most places between two cuts
)

// A fate decides where the workers of a site are cut off. A place is before a statement or before its answer.
type fate struct {
	mu     sync.Mutex
	rand   *rand.Rand
	next   int // places until the next cut
	cuts   int
	dies   int // the cut at which the worker dies
	broken int
	died   int
}

// newFate returns a fate drawn from GRAPH_MORTAL and the name of the test. It returns nil if GRAPH_MORTAL is not set or
// the test is undisturbed.
func newFate(t *testing.T) *fate {
	text := os.Getenv("GRAPH_MORTAL")
	if text == "" {
		return nil
	}
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("GRAPH_MORTAL: %v", err)
	}
	test, _, _ := strings.Cut(t.Name(), "/")
	if why := undisturbed[test]; why != "" {
		t.Logf("its workers are not cut off: %s", why)
		return nil
	}
	name := fnv.New64()
	_, _ = name.Write([]byte(t.Name()))
	f := &fate{rand: rand.New(rand.NewPCG(seed, name.Sum64()))}
	f.next, f.dies = 1+f.rand.IntN(cutsApart), f.rand.IntN(3)
	if immortal[test] {
		f.spare()
	}
	t.Cleanup(func() {
		t.Logf("make graph-mortal SEED=%d: %d connections broke, and %d workers died", seed, f.broken, f.died)
	})
	return f
}

// spare lets no worker die. A nil fate is that of a site that is not disturbed.
func (f *fate) spare() {
	if f != nil {
		f.dies = cutsOfSite
	}
}

type end int

const (
	lives end = iota
	breaks
	dies
)

// strikes decides what happens at the next place.
func (f *fate) strikes() end {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cuts == cutsOfSite {
		return lives
	}
	if f.next--; f.next > 0 {
		return lives
	}
	f.next = 1 + f.rand.IntN(cutsApart)
	f.cuts++
	if f.cuts-1 == f.dies {
		f.died++
		return dies
	}
	f.broken++
	return breaks
}

// doom makes the connections of a worker of the site break where its fate strikes.
func (s *site) doom(m *mortal, c *pgxpool.Config) {
	dial := c.ConnConfig.DialFunc
	strikes := func() bool {
		switch s.fate.strikes() {
		case breaks:
			return true
		case dies:
			if s.t.Context().Err() == nil {
				m.leave(s.hire())
			}
			return true
		}
		return false
	}
	c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &doomed{Conn: conn, strikes: strikes}, nil
	}
}

// A doomed connection breaks within a transaction, before something is sent or before its answer is read.
type doomed struct {
	net.Conn
	strikes func() bool

	inside bool // a transaction is open
}

var errCut = errors.New("the connection was cut")

func (d *doomed) Write(p []byte) (int, error) {
	if d.inside && d.strikes() {
		_ = d.Close()
		return 0, errCut
	}
	return d.Conn.Write(p)
}

func (d *doomed) Read(p []byte) (int, error) {
	n, err := d.Conn.Read(p)
	at := bytes.LastIndex(p[:n], readyForQuery)
	if err != nil || at < 0 || at+len(readyForQuery) != n-1 {
		return n, err // not the end of an answer
	}
	was := d.inside
	d.inside = p[n-1] != 'I'
	if (was || d.inside) && d.strikes() {
		_ = d.Close()
		return 0, errCut
	}
	return n, nil
}

// readyForQuery is the message that ends an answer. A byte follows that says whether a transaction is open, or I.
var readyForQuery = []byte{'Z', 0, 0, 0, 5}

// await calls pgtest.Await.
func await(t testing.TB, what string, cond func() bool) {
	t.Helper()
	pgtest.Await(t, what, cond)
}
