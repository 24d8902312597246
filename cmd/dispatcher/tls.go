package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
)

// tlsOptions are the options of sinks that use TLS: paths of PEM files.
var tlsOptions = []string{"ca", "cert", "key"}

// tls returns the TLS configuration of the options; nil if none of them is set. The client certificate is
// read at each handshake, so that a renewed one is used without a restart.
func (spec sinkSpec) tls() (*tls.Config, error) {
	ca, cert, key := spec.options.Get("ca"), spec.options.Get("cert"), spec.options.Get("key")
	if ca == "" && cert == "" && key == "" {
		return nil, nil
	}
	if (cert == "") != (key == "") {
		return nil, errors.New("cert, key: give both, the paths of a certificate and of its private key, or none")
	}
	c := &tls.Config{}
	if ca != "" {
		text, err := os.ReadFile(ca)
		if err != nil {
			return nil, fmt.Errorf("ca: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("ca: %s has no certificate in PEM", ca)
		}
	}
	if cert != "" {
		if _, err := tls.LoadX509KeyPair(cert, key); err != nil {
			return nil, fmt.Errorf("cert, key: %w", err)
		}
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(cert, key)
			return &pair, err
		}
	}
	return c, nil
}
