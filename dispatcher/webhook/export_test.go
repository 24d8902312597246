package webhook

import "net/url"

// Late returns a sink whose address is checked only when it is dialled.
func Late(c Config) *Sink {
	u, err := url.Parse(c.URL)
	if err != nil {
		panic(err)
	}
	c.AtOnce, c.Timeout = 1, DefaultTimeout
	return &Sink{config: c, client: c.newClient(), masked: mask(u)}
}
