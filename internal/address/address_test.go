package address_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/simple-workflow/simple-workflow/dispatcher/webhook"
	"github.com/simple-workflow/simple-workflow/internal/address"
	"github.com/simple-workflow/simple-workflow/internal/handlers"
)

// Webhooks and handlers from a file accept the same URLs and networks, and refuse the same ones.
func TestOnePolicy(t *testing.T) {
	for _, row := range []struct {
		url, allow string // empty: only public addresses
		good       bool
	}{
		{"https://crm.example/events", "", true},
		{"https://crm.example:8443/events", "", true},
		{"https://8.8.8.8/", "8.8.8.8/32", true},
		{"https://10.1.2.3/", "10.0.0.0/8", true},
		{"https://[fd00::1]/", "fd00::/8", true},
		{"https://10.1.2.3/", "0.0.0.0/0", false},
		{"https://[fd00::1]/", "::/0", false},
		{"https://10.1.2.3/", "10.1.2.3/8", false},
		{"https://10.1.2.3/", "::ffff:10.0.0.0/104", false},
		{"https://10.1.2.3/", "10.0.0.0/33", false},
		{"https://10.1.2.3/", "11.0.0.0/8", false},
		{"https://crm.example:99999/", "", false},
		{"https://crm.example:0/", "", false},
		{"https://crm.example:/", "", false},
		{"https://2130706433/", "", false},
		{"https://0x7f.1/", "", false},
		{"https://127.1/", "", false},
		{"https://crm.0x7f/", "", false},
		{"https://*.example/", "", false},
		{"https://crm example/", "", false},
		{"https://[fe80::1%25eth0]/", "", false},
	} {
		var networks []netip.Prefix
		hook := error(nil)
		if row.allow != "" {
			network, why := address.Network(row.allow)
			if why != "" {
				network, _ = netip.ParsePrefix(row.allow) // as a caller of webhook.New may pass it, unchecked
			}
			networks = append(networks, network)
		}
		_, hook = webhook.New(webhook.Config{URL: row.url, Allow: networks})
		text := "a.b: {url: '" + row.url + "'"
		if row.allow != "" {
			text += ", allow: ['" + row.allow + "']"
		}
		file := filepath.Join(t.TempDir(), "handlers.yaml")
		if err := os.WriteFile(file, []byte(text+"}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, handler := handlers.Load(file)
		if (hook == nil) != row.good || (handler == nil) != row.good {
			t.Errorf("%s allow %s: webhook %v, handler %v; want good %t", row.url, row.allow, hook, handler, row.good)
		}
	}
}

// Public returns the value in the table for each address, and webhook.New refuses those that are not public.
func TestPublic(t *testing.T) {
	for text, want := range map[string]bool{
		"8.8.8.8": true, "2606:4700::1111": true, "64:ff9b::808:808": true,
		"0.0.0.0": false, "10.0.0.1": false, "100.64.0.1": false, "127.0.0.1": false, "169.254.169.254": false, "172.16.0.1": false, "192.168.1.1": false,
		"192.0.2.1": false, "198.18.0.1": false, "224.0.0.1": false, "255.255.255.255": false,
		"::": false, "::1": false, "fe80::1": false, "fc00::1": false, "fec0::1": false, "ff02::1": false, "2001::1": false, "2001:db8::1": false,
		"2002:a00:1::": false, "3fff::1": false, "64:ff9b::a00:1": false, "64:ff9b:1::1": false, "5f00::1": false,
	} {
		if got := address.Public(netip.MustParseAddr(text)); got != want {
			t.Errorf("%s: public %t, want %t", text, got, want)
		}
		_, err := webhook.New(webhook.Config{URL: "https://" + bracketed(text) + "/"})
		if (err == nil) != want {
			t.Errorf("webhook to %s: %v", text, err)
		}
	}
}

func bracketed(text string) string {
	if strings.Contains(text, ":") {
		return "[" + text + "]"
	}
	return text
}
