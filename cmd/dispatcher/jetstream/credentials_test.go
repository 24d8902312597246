package jetstream_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/simple-workflow/simple-workflow/cmd/dispatcher/jetstream"
	"github.com/simple-workflow/simple-workflow/internal/sinktest"
)

// A realm is a NATS operator with an account, and a server that accepts only their JWTs.
type realm struct {
	t       *testing.T
	account nkeys.KeyPair
	server  *server.Server
}

func newRealm(t *testing.T) *realm {
	operator, account, system := pair(t, nkeys.CreateOperator), pair(t, nkeys.CreateAccount), pair(t, nkeys.CreateAccount)
	claims := jwt.NewOperatorClaims(public(t, operator))
	claims.SystemAccount = public(t, system)
	resolver := &server.MemAccResolver{}
	for _, kp := range []nkeys.KeyPair{account, system} {
		a := jwt.NewAccountClaims(public(t, kp))
		if kp == account {
			a.Limits.JetStreamLimits = jwt.JetStreamLimits{MemoryStorage: -1, DiskStorage: -1, Streams: -1, Consumer: -1}
		}
		token, err := a.Encode(operator)
		if err == nil {
			err = resolver.Store(public(t, kp), token)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	s := serve(t, t.TempDir(), -1, func(o *server.Options) {
		o.TrustedOperators, o.SystemAccount, o.AccountResolver = []*jwt.OperatorClaims{claims}, claims.SystemAccount, resolver
	})
	return &realm{t, account, s}
}

func pair(t *testing.T, create func() (nkeys.KeyPair, error)) nkeys.KeyPair {
	t.Helper()
	kp, err := create()
	if err != nil {
		t.Fatal(err)
	}
	return kp
}

func public(t *testing.T, kp nkeys.KeyPair) string {
	t.Helper()
	key, err := kp.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// credentials writes the credentials file of a new user, as nsc does.
func (r *realm) credentials(path string) {
	r.t.Helper()
	user := pair(r.t, nkeys.CreateUser)
	token, err := jwt.NewUserClaims(public(r.t, user)).Encode(r.account)
	if err != nil {
		r.t.Fatal(err)
	}
	seed, err := user.Seed()
	if err != nil {
		r.t.Fatal(err)
	}
	text, err := jwt.FormatUserConfig(token, seed)
	if err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

// On a server that requires JWTs, events are acknowledged with a credentials file; without one the sink is unavailable.
func TestCredentials(t *testing.T) {
	r := newRealm(t)
	file := filepath.Join(t.TempDir(), "user.creds")
	r.credentials(file)
	stream(t, reader(t, r.server.ClientURL(), nats.UserCredentials(file)), natsjs.StreamConfig{Subjects: []string{"shop.>"}})

	url := r.server.ClientURL() + "/shop"
	events := []event.Event{sinktest.Event(1, "order-1", "invoice.created", `{"total":5}`)}
	sinktest.Failed(t, open(t, url, false).Publish(t.Context(), events)[0], sinktest.Unavailable, "Authorization")
	sink, err := jetstream.New(jetstream.Config{URL: url, Credentials: file})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sink.Close() })
	sinktest.Delivered(t, sink.Publish(t.Context(), events), 1)
}

// New refuses a credentials file that does not exist, and one in addition to a user in the URL.
func TestCredentialsRefused(t *testing.T) {
	there := filepath.Join(t.TempDir(), "user.creds")
	if err := os.WriteFile(there, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []jetstream.Config{{URL: "nats://h/s", Credentials: there + "x"}, {URL: "nats://u:hunter2@h/s", Credentials: there}} {
		_, err := jetstream.New(c)
		if err == nil || !strings.Contains(err.Error(), "Credentials") || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", c.URL, err)
		}
	}
}
