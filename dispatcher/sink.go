package dispatcher

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
)

// A Sink delivers events to an external system.
type Sink interface {
	// Publish sends events and returns one error per event, in the same order. A nil error means
	// that the receiver acknowledged the event: it has confirmed that it keeps it. Publish is called
	// concurrently; concurrent batches have no subject in common.
	//
	// Events of one subject must arrive in the order given. If one fails, Publish must not send the later
	// events of its subject, and returns ErrNotTried for them. Publish returns soon after ctx ends.
	Publish(ctx context.Context, events []event.Event) []error
	// Close closes connections and ends processes.
	Close() error
}

// An error that Publish returns decides what happens to its event:
//
//   - Reject: the sink rejects this event. The event is retried, and parked after three rejections.
//     No rejection is counted while ten aggregates were rejected and nothing was acknowledged since.
//   - RejectForGood: the sink can never accept this event. The event is parked at once.
//   - Unavailable: the sink accepts nothing at present. The dispatcher pauses the sink; the
//     attempt is not charged to any event.
//   - ErrNotTried: the event was not sent. No attempt is charged.
//   - Any other error may be temporary. The event is retried after a backoff, and later events of its
//     subject wait for it. After Config.MaxAttempts failures it is parked. No failure is counted while three
//     aggregates failed and nothing was acknowledged since.

// ErrNotTried means that an event was not sent: an earlier event of its subject failed, or no time
// was left.
var ErrNotTried = errors.New("not tried")

type rejection struct {
	error
	final bool
}

func (r *rejection) Unwrap() error { return r.error }

// Reject wraps err to report that the sink rejects an event. A later attempt may succeed.
func Reject(err error) error { return &rejection{error: err} }

// RejectForGood wraps err to report that the sink can never accept an event, for example because it is too large.
func RejectForGood(err error) error { return &rejection{error: err, final: true} }

type unavailable struct {
	error
	after time.Duration
}

func (u *unavailable) Unwrap() error { return u.error }

// Unavailable wraps err to report that the sink accepts nothing at present. after is the least time to wait before the
// next attempt; the dispatcher's own backoff may be longer. after is limited to between zero and one hour.
func Unavailable(err error, after time.Duration) error {
	return &unavailable{error: err, after: min(max(after, 0), time.Hour)}
}

// BySubject calls send for each event and returns its errors, in the order of events. Events of one subject are sent
// one after the other; up to atOnce subjects are sent concurrently. After an error, the rest of that subject gets
// ErrNotTried. After an Unavailable error, or once ctx ends, every event that send has not been called for gets
// ErrNotTried.
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
	var down atomic.Bool // sends that have begun may still be acknowledged
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
