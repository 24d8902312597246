//go:build !noamqp

package main

import (
	"github.com/simple-workflow/simple-workflow/cmd/dispatcher/amqp"
	"github.com/simple-workflow/simple-workflow/dispatcher"
)

func init() {
	options := []string{"mode", "exchange"}
	kinds["amqp"] = scheme{"amqp://HOST/VHOST", "RabbitMQ; amqps:// with TLS", options, openAMQP}
	kinds["amqps"] = scheme{"amqps://HOST/VHOST", "", append(options, tlsOptions...), openAMQP}
}

func openAMQP(_ *settings, spec sinkSpec) (dispatcher.Sink, error) {
	binary, secure, err := spec.wire()
	if err != nil {
		return nil, err
	}
	return amqp.New(amqp.Config{URL: spec.url.String(), Exchange: spec.options.Get("exchange"), Binary: binary, TLS: secure})
}
