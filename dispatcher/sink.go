package dispatcher

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
)

// A Sink takes events to where they belong.
type Sink interface {
	// Publish returns an error for each event, in their order; nil means acknowledged: the other
	// side has said that it keeps the event. It is called for several batches at once, which have
	// no subject in common.
	//
	// Within a subject events arrive in the order given. If one fails, those of its subject after
	// it are not sent, and their error is ErrNotTried. When ctx ends, so does Publish.
	Publish(ctx context.Context, events []event.Event) []error
	// Close lets go of connections and processes.
	Close() error
}

// What an error of Publish means for its event:
//
//   - Reject: the sink does not want this event. After three times it is parked, unless it wants
//     none at all.
//   - RejectForGood: it never will. The event is parked at once.
//   - Unavailable: the sink takes nothing now. It is left alone for a while, and no event is
//     charged with the try.
//   - ErrNotTried: it was not sent.
//   - any other: it may be different the next time. The event, and those of its subject after it,
//     are tried again later; after Config.MaxAttempts it is parked, unless all others fail, too.

// ErrNotTried means that an event was not sent, because one of its subject before it has failed,
// or there was no time left.
var ErrNotTried = errors.New("not tried")

type rejection struct {
	error
	final bool
}

func (r *rejection) Unwrap() error { return r.error }

// Reject says that a sink does not want an event.
func Reject(err error) error { return &rejection{error: err} }

// RejectForGood says that a sink can never take an event, such as one that is too large for it.
func RejectForGood(err error) error { return &rejection{error: err, final: true} }

type unavailable struct {
	error
	after time.Duration
}

func (u *unavailable) Unwrap() error { return u.error }

// Unavailable says that a sink takes nothing now. after is how long it wants to be left alone;
// 0: as long as the dispatcher thinks fit; more than an hour counts as one.
func Unavailable(err error, after time.Duration) error {
	return &unavailable{error: err, after: min(max(after, 0), time.Hour)}
}

// Unsent are the errors of n events of which none was sent, for the reason err: ErrNotTried, if ctx
// has ended; else the sink is unavailable.
func Unsent(ctx context.Context, n int, err error) []error {
	if ctx.Err() != nil {
		return all(n, ErrNotTried)
	}
	return all(n, Unavailable(err, 0))
}

// BySubject calls send for each event: one after the other for those of one subject, at once for
// up to so many subjects. After an error of a subject, or the end of ctx, the rest is not tried.
// After a send that finds the sink unavailable no more are begun.
func BySubject(ctx context.Context, events []event.Event, atOnce int, send func(context.Context, event.Event) error) []error {
	errs := make([]error, len(events))
	order := map[string][]int{}
	var subjects []string
	for k, e := range events {
		if order[e.Subject()] == nil {
			subjects = append(subjects, e.Subject())
		}
		order[e.Subject()] = append(order[e.Subject()], k)
	}
	var down atomic.Bool // what is under way may still be acknowledged
	next := make(chan []int)
	var group sync.WaitGroup
	for range min(max(atOnce, 1), len(subjects)) {
		group.Go(func() {
			for places := range next {
				var failed error
				for _, k := range places {
					if failed != nil || down.Load() || ctx.Err() != nil {
						errs[k] = ErrNotTried
						continue
					}
					errs[k] = send(ctx, events[k])
					failed = errs[k]
					if u := (*unavailable)(nil); errors.As(failed, &u) {
						down.Store(true)
					}
				}
			}
		})
	}
	for _, s := range subjects {
		next <- order[s]
	}
	close(next)
	group.Wait()
	return errs
}
