package agent

import "github.com/cove-sandbox/cove/guest/wire"

func (s *session) watch(ep *episode, r wire.Req) error { return nil }
