package guest

import "time"

// SetYoung replaces what a pause gives an exec from its start to end.
func (c *Client) SetYoung(d time.Duration) { c.young = d }
