//go:build !nokafka

package main

import (
	"github.com/simple-workflow/simple-workflow/cmd/dispatcher/kafka"
	"github.com/simple-workflow/simple-workflow/dispatcher"
)

func init() {
	kinds["kafka"] = scheme{"kafka://HOST,HOST/TOPIC", "Kafka; kafkas:// with TLS", []string{"mode", "sasl"}, openKafka}
	kinds["kafkas"] = scheme{"kafkas://HOST,HOST/TOPIC", "", append([]string{"mode", "sasl"}, tlsOptions...), openKafka}
}

func openKafka(_ *settings, spec sinkSpec) (dispatcher.Sink, error) {
	binary, secure, err := spec.wire()
	if err != nil {
		return nil, err
	}
	return kafka.New(kafka.Config{URL: spec.url.String(), SASL: spec.options.Get("sasl"), Binary: binary, TLS: secure})
}
