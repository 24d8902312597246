package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/simple-workflow/simple-workflow/internal/sinktest"
)

// An authority is a CA that signs certificates for a test.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	last int64
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t, last: 1}
	a.cert, a.key = a.sign(&x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	return a
}

func (a *authority) sign(c *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	a.last++
	c.SerialNumber, c.Subject = big.NewInt(a.last), pkix.Name{CommonName: "test"}
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	signed, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return signed, key
}

// issue writes a new certificate and its key to dir.
func (a *authority) issue(dir string) (pair tls.Certificate) {
	a.t.Helper()
	c, key := a.sign(&x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}})
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	a.write(filepath.Join(dir, "cert.pem"), "CERTIFICATE", c.Raw)
	a.write(filepath.Join(dir, "key.pem"), "EC PRIVATE KEY", der)
	return tls.Certificate{Certificate: [][]byte{c.Raw}, PrivateKey: key}
}

func (a *authority) write(path, kind string, der []byte) {
	a.t.Helper()
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
}

// A sink sends the client certificate of cert and key, trusts the CA of ca, and uses a renewed certificate
// without a restart (K16).
func TestCertificates(t *testing.T) {
	dir := t.TempDir()
	a := newAuthority(t)
	a.write(filepath.Join(dir, "ca.pem"), "CERTIFICATE", a.cert.Raw)
	known := x509.NewCertPool()
	known.AddCert(a.cert)
	var serials []int64
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		serials = append(serials, r.TLS.PeerCertificates[0].SerialNumber.Int64())
	}))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{a.issue(t.TempDir())}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: known}
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.Config.SetKeepAlivesEnabled(false) // so that each request has a handshake
	s.StartTLS()
	t.Cleanup(s.Close)

	publish := func(options string) error {
		t.Helper()
		specs, problems := parseSinks(s.URL + "/#allow=127.0.0.0/8" + options)
		if len(problems) > 0 {
			t.Fatal(problems)
		}
		target, err := specs[0].target(&settings{})
		if err != nil {
			t.Fatal(err)
		}
		defer target.Sink.Close()
		return target.Sink.Publish(t.Context(), []event.Event{sinktest.Event(1, "a", "b", "1")})[0]
	}
	a.issue(dir)
	both := "&ca=" + dir + "/ca.pem&cert=" + dir + "/cert.pem&key=" + dir + "/key.pem"
	for _, options := range []string{"", "&ca=" + dir + "/ca.pem", strings.Replace(both, "&ca="+dir+"/ca.pem", "", 1)} {
		if err := publish(options); err == nil {
			t.Errorf("%q: the server lets in who shows no certificate, or is trusted unknown", options)
		}
	}
	if err := publish(both); err != nil {
		t.Fatal(err)
	}
	specs, _ := parseSinks(s.URL + "/#allow=127.0.0.0/8" + both)
	target, err := specs[0].target(&settings{})
	if err != nil {
		t.Fatal(err)
	}
	defer target.Sink.Close()
	for range 2 {
		if err := target.Sink.Publish(t.Context(), []event.Event{sinktest.Event(1, "a", "b", "1")})[0]; err != nil {
			t.Fatal(err)
		}
		a.issue(dir)
	}
	if len(serials) != 3 || serials[1] != serials[0] || serials[2] <= serials[1] {
		t.Errorf("certificates %d were shown; want the same twice, then a newer one", serials)
	}
}

// A mistake in the certificate options is refused at start, with the name of the option and of the file.
func TestCertificatesRefused(t *testing.T) {
	dir := t.TempDir()
	a := newAuthority(t)
	a.issue(dir)
	empty := filepath.Join(dir, "empty.pem")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for options, want := range map[string]string{
		"ca=" + dir + "/none.pem":                                       "none.pem",
		"ca=" + empty:                                                   "no certificate in PEM",
		"cert=" + dir + "/cert.pem":                                     "give both",
		"key=" + dir + "/key.pem":                                       "give both",
		"cert=" + dir + "/cert.pem&key=" + dir + "/cert.pem":            "cert, key",
		"cert=" + dir + "/cert.pem&key=" + dir + "/key.pem&ca=" + empty: "ca:",
	} {
		specs, problems := parseSinks("https://crm.example/#" + options)
		if len(problems) > 0 {
			t.Errorf("%s: %s", options, problems)
			continue
		}
		if _, err := specs[0].target(&settings{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", options, err, want)
		}
	}
	if _, problems := parseSinks("http://crm.example/#ca=" + dir + "/cert.pem"); len(problems) == 0 {
		t.Error("http: takes the option ca, though it has no TLS")
	}
}
