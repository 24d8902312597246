//go:build !nonats

package main

import (
	"github.com/simple-workflow/simple-workflow/cmd/dispatcher/jetstream"
	"github.com/simple-workflow/simple-workflow/dispatcher"
)

func init() {
	kinds["nats"] = scheme{"nats://HOST/SUBJECT", "NATS JetStream; tls:// with TLS", []string{"mode", "creds"}, openJetStream}
	kinds["tls"] = scheme{"tls://HOST/SUBJECT", "", append([]string{"mode", "creds"}, tlsOptions...), openJetStream}
}

func openJetStream(_ *settings, spec sinkSpec) (dispatcher.Sink, error) {
	binary, secure, err := spec.wire()
	if err != nil {
		return nil, err
	}
	return jetstream.New(jetstream.Config{URL: spec.url.String(), Binary: binary, TLS: secure, Credentials: spec.options.Get("creds")})
}
