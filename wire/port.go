package wire

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// PortStream is a byte stream to a port inside a sandbox. Each half of it is
// closed by its own side.
type PortStream interface {
	io.ReadWriteCloser
	CloseWrite() error
}

// ConnectPort opens a stream to a TCP port inside a sandbox.
// sandbox.ErrPortClosed if nothing listens there. The context is of the whole
// stream.
func (c *Client) ConnectPort(ctx context.Context, id string, port int) (PortStream, error) {
	req, err := c.portRequest(ctx, id, port)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "cove-tcp")
	resp, err := c.send(req)
	if err != nil {
		return nil, err
	}
	s, ok := resp.Body.(PortStream)
	if resp.StatusCode != http.StatusSwitchingProtocols || !ok {
		resp.Body.Close()
		return nil, &sandbox.Error{Class: sandbox.Unsupported, Msg: "the server, or a proxy before it, does not upgrade connections"}
	}
	return s, nil
}

// CheckPort is nil if ConnectPort may be called, whatever listens there: nothing
// inside sees it. A request that is right but for the upgrade is refused for that
// alone.
func (c *Client) CheckPort(ctx context.Context, id string, port int) error {
	req, err := c.portRequest(ctx, id, port)
	if err != nil {
		return err
	}
	resp, err := c.send(req)
	if err == nil {
		return resp.Body.Close()
	}
	var e *sandbox.Error
	if errors.As(err, &e) && e.Class == sandbox.Invalid && e.Field == "upgrade" {
		return nil
	}
	return err
}

func (c *Client) portRequest(ctx context.Context, id string, port int) (*http.Request, error) {
	q := url.Values{"port": {strconv.Itoa(port)}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url+sandboxPath(id, "connect")+"?"+q.Encode(), nil)
	if err != nil {
		return nil, sandbox.InvalidField("url", "%v", err)
	}
	return req, nil
}

// PortURL is the whole address of a port, with its token unless it is public.
// The server knows only the path where it has no domain.
func (c *Client) PortURL(r *covev1.PortUrlResponse) string {
	u := r.GetUrl()
	if strings.HasPrefix(u, "/") {
		u = c.url + u
	}
	if r.GetToken() != "" && !r.GetPublic() {
		u += "?cove_token=" + url.QueryEscape(r.GetToken())
	}
	return u
}
