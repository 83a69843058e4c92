package wire

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"github.com/cove-sandbox/cove/sandbox"
)

func callbackPath(id, request string) string {
	return sandboxPath(id, "callbacks/"+url.PathEscape(request))
}

// CallbackBody opens the body of a request from inside whose event did not have
// it. Once.
func (c *Client) CallbackBody(ctx context.Context, id, request string) (io.ReadCloser, error) {
	body, _, err := c.get(ctx, callbackPath(id, request)+"/body", nil, "")
	return body, err
}

// AnswerCallback answers a request from inside and returns when its caller has
// the answer. What body gives is passed on as it comes; length -1 is until it
// ends. Headers of the connection are left out. sandbox.ErrCanceled if the
// caller has left.
func (c *Client) AnswerCallback(ctx context.Context, id, request string, status int, h http.Header, body io.Reader, length int64) error {
	if length == 0 {
		body = http.NoBody
	}
	u := c.url + callbackPath(id, request) + "?status=" + strconv.Itoa(status)
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, u, body)
	if err != nil {
		return sandbox.InvalidField("url", "%v", err)
	}
	req.ContentLength = length
	for k, vs := range h {
		for _, v := range vs {
			req.Header.Add("Cove-Answer-"+k, v)
		}
	}
	resp, err := c.send(req)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}
