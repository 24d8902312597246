//go:build !nonats && !nokafka && !noamqp

package main

import (
	"strings"
	"testing"
)

// Opening the sink of a broker does not connect to anything.
func TestBrokers(t *testing.T) {
	specs, problems := parseSinks("nats://u:p@h1:4222,h2:4222/shop#mode=binary tls://h/shop kafka://h1:9092,h2:9092/shop#types=a. " +
		"kafkas://u:p@h/shop amqp://u:p@h/%2f#exchange=shop&mode=binary amqps://h#exchange=shop")
	if len(problems) > 0 || len(specs) != 6 {
		t.Fatal(problems)
	}
	for _, spec := range specs {
		target, err := spec.target(&settings{})
		if err != nil {
			t.Errorf("%s: %v", spec.name, err)
			continue
		}
		if err := target.Sink.Close(); err != nil {
			t.Errorf("%s: %v", spec.name, err)
		}
	}
	help := schemes()
	for _, form := range []string{"nats://HOST/SUBJECT", "kafka://HOST,HOST/TOPIC", "amqp://HOST/VHOST"} {
		if !strings.Contains(help, form) {
			t.Errorf("--help has no %s", form)
		}
	}
}

// A mistake in the URL or the options of a broker's sink is refused at start, and the error does not contain the
// password.
func TestBrokersRefused(t *testing.T) {
	for text, want := range map[string]string{
		"nats://u:hunter2@h":                   "subject",
		"kafka://u:hunter2@h":                  "topic",
		"kafka://u:hunter2@h/a/b":              "topic",
		"amqp://u:hunter2@h":                   "exchange",
		"nats://u:hunter2@h/s#mode=avro":       "structured or binary",
		"kafka://u:hunter2@h/t#mode=avro":      "structured or binary",
		"amqp://u:hunter2@h#exchange=&mode=ce": "structured or binary",
		"kafka://u:hunter2@h/t#sasl=gssapi":    "plain, scram-sha-256 or scram-sha-512",
		"kafka://h/t#sasl=scram-sha-512":       "needs a user",
		"nats://h/s#creds=/none/user.creds":    "/none/user.creds",
	} {
		specs, problems := parseSinks(text)
		if len(problems) > 0 {
			t.Errorf("%s: %s", text, problems)
			continue
		}
		_, err := specs[0].target(&settings{})
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v; want a word about %s", text, err, want)
		}
	}
}
