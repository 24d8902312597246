package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	natsjetstream "github.com/nats-io/nats.go/jetstream"

	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/dispatcher/jetstream"
)

const (
	oneToJetStream = "backlog of %s, 1 dispatcher to JetStream"
	twoToJetStream = "backlog of %s, 2 dispatchers to JetStream"

	brokerSubject = "bench"
	brokerKey     = "broker CPU"
	keptKey       = "kept"
)

// broker is nats-server, in a process of its own, with one stream in a file.
type broker struct{ ours }

func (broker) name() string { return "nats-server" }

func (broker) process(t task) *exec.Cmd { return exec.Command(self(), "child", t.String()) }

// carryOut says at which port the server is, and serves until release; then it tells how many
// messages the stream has kept.
func (broker) carryOut(ctx context.Context, _ task, c *conversation) error {
	dir, err := os.MkdirTemp("", "bench-nats-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	s, err := natsserver.NewServer(&natsserver.Options{Host: "127.0.0.1", Port: natsserver.RANDOM_PORT, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true})
	if err != nil {
		return err
	}
	go s.Start()
	defer s.WaitForShutdown()
	defer s.Shutdown()
	if !s.ReadyForConnections(10 * time.Second) {
		return errors.New("nats-server does not start")
	}
	conn, err := nats.Connect(s.ClientURL())
	if err != nil {
		return err
	}
	defer conn.Close()
	js, err := natsjetstream.New(conn)
	if err != nil {
		return err
	}
	stream, err := js.CreateStream(ctx, natsjetstream.StreamConfig{Name: "BENCH", Subjects: []string{brokerSubject + ".>"}, Storage: natsjetstream.FileStorage})
	if err != nil || !c.ready() {
		return err
	}
	c.say("seen %d %s", brokerPort, portOf(s))
	<-c.released
	info, err := stream.Info(ctx)
	if err != nil {
		return err
	}
	c.done(map[string]float64{keptKey: float64(info.State.Msgs)})
	return nil
}

// brokerPort is what the broker says that it has seen when it tells its port.
const brokerPort = 1

func portOf(s *natsserver.Server) string {
	address := s.PortsInfo(time.Second).Nats[0]
	for i := len(address) - 1; ; i-- {
		if address[i] == ':' {
			return address[i+1:]
		}
	}
}

// throughBroker is publish with a JetStream that is this measurement's own.
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

// sink is where a dispatcher is to publish to.
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

// Publish has the sink publish, and counts.
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
