package webhook

import (
	"net/url"

	"github.com/simple-workflow/simple-workflow/internal/shipped"
)

// Late returns a sink whose address is checked only when it is dialled.
func Late(c Config) *sink {
	u, err := url.Parse(c.URL)
	if err != nil {
		panic(err)
	}
	c.AtOnce, c.Timeout = 1, shipped.WebhookTimeout
	return &sink{config: c, client: c.newClient(), masked: mask(u)}
}
