package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/simple-workflow/simple-workflow/cmd/dispatcher/jetstream"
	"github.com/simple-workflow/simple-workflow/dispatcher"
)

const (
	oneToJetStream = "backlog of %s, 1 dispatcher to JetStream"
	twoToJetStream = "backlog of %s, 2 dispatchers to JetStream"

	brokerSubject = "bench"
	brokerKey     = "broker CPU"
	keptKey       = "kept"
)

// broker is the program in the directory of that name.
type broker struct{ ours }

// brokerPort is the number that the broker uses in its seen line to report its port.
const brokerPort = 1

func (broker) name() string { return "nats-server" }

func (broker) process(task) *exec.Cmd { return exec.Command(brokerPath(), brokerSubject) }

// brokerPath is the path of the broker, beside this program.
func brokerPath() string { return self() + "-broker" }

// prepareBroker builds the broker.
func prepareBroker(ctx context.Context) error {
	build := exec.CommandContext(ctx, "go", "build", "-o", brokerPath(), "./broker")
	build.Env = append(os.Environ(), "GOWORK=off") // the bench stands outside of the workspace
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build the broker: %w: %s", err, out)
	}
	return nil
}

// throughBroker is publish to a JetStream that only this measurement uses.
func (b *bench) throughBroker(ctx context.Context, db *database, w backlog, s *sample) error {
	nats, err := start(broker{}, task{}, 1)
	if err != nil {
		return err
	}
	return errors.Join(b.intoStream(ctx, db, w, nats, s), nats.stop())
}

func (b *bench) intoStream(ctx context.Context, db *database, w backlog, nats processes, s *sample) error {
	nats.say("go")
	port, err := awaitSeen(ctx, nats, brokerPort, 10*time.Second)
	if err != nil {
		return err
	}
	w.task.JetStream = fmt.Sprintf("nats://127.0.0.1:%d/%s", port, brokerSubject)
	before, err := b.server.read(ctx, nats)
	if err != nil {
		return err
	}
	if err := b.publish(ctx, db, w, s); err != nil {
		return err
	}
	after, err := b.server.read(ctx, nats)
	if err != nil {
		return err
	}
	s.More = map[string]float64{brokerKey: (after.workers - before.workers) * 100_000 / float64(s.Runs)}
	nats.say("release")
	select {
	case facts := <-nats[0].done:
		if kept := int(facts[keptKey]); kept != s.Runs {
			return fmt.Errorf("the stream has kept %d of %d events", kept, s.Runs)
		}
		return nil
	case <-nats[0].ended:
		return errors.New("nats-server ended by itself")
	}
}

// sink returns the sink that a dispatcher publishes to.
func (t task) sink(c *conversation) (dispatcher.Sink, error) {
	seen := &counted{c: c, told: t.Told}
	if t.JetStream == "" {
		return &nowhere{seen}, nil
	}
	s, err := jetstream.New(jetstream.Config{URL: t.JetStream})
	return &counting{Sink: s, counted: seen}, err
}

// counting counts what another sink has acknowledged.
type counting struct {
	dispatcher.Sink
	*counted
}

// Publish publishes to the sink, and counts.
func (w *counting) Publish(ctx context.Context, events []event.Event) []error {
	errs := w.Sink.Publish(ctx, events)
	at := clock()
	numbers := make([]int, 0, len(events))
	for k, err := range errs {
		if err == nil {
			numbers = append(numbers, numberOfEvent(events[k].ID()))
		}
	}
	w.count(numbers, at)
	return errs
}
