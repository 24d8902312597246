//go:build !nonats

package main

import (
	"github.com/simple-workflow/simple-workflow/dispatcher"
	"github.com/simple-workflow/simple-workflow/dispatcher/jetstream"
)

func init() {
	kinds["nats"] = scheme{"nats://HOST/SUBJECT", "NATS JetStream; tls:// with TLS", []string{"mode"}, openJetStream}
	kinds["tls"] = scheme{"tls://HOST/SUBJECT", "", []string{"mode"}, openJetStream}
}

func openJetStream(_ *settings, spec sinkSpec) (dispatcher.Sink, error) {
	binary, err := spec.binary()
	if err != nil {
		return nil, err
	}
	return jetstream.New(jetstream.Config{URL: spec.url.String(), Binary: binary})
}
