package e2b

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// cpuSample is how long the use of the CPU is measured: Cove counts what was used,
// E2B says how much is.
const cpuSample = 100 * time.Millisecond

// metric is one measurement, in the fields that both surfaces have.
type metric struct {
	at                                  time.Time
	cpus                                float64
	cpuPct                              float64
	memUsed, memTotal, diskUsed, diskAt int64
}

func (d *dialect) measure(ctx context.Context, sb sandbox.Sandbox) (m metric, err error) {
	first, err := d.server.SandboxStats(ctx, sb.ID)
	if err != nil {
		return m, err
	}
	began := time.Now()
	select {
	case <-time.After(cpuSample):
	case <-ctx.Done():
		return m, ctx.Err()
	}
	last, err := d.server.SandboxStats(ctx, sb.ID)
	if err != nil {
		return m, err
	}
	r := sb.Spec.Resources
	m = metric{at: d.clock().UTC(), cpus: max(1, float64(r.MilliCPU)/1000), memUsed: last.Memory, memTotal: max(r.Memory, r.MemoryLimit), diskUsed: last.DiskUsed, diskAt: r.Disk}
	m.cpuPct = 100 * (last.CPUTime - first.CPUTime).Seconds() / time.Since(began).Seconds()
	return m, nil
}

// bucket is how far E2B's measurements are apart: one of so long ago is of now.
const bucket = 5 * time.Second

// ofNow says whether a query asks for what is now, by its start and end in unix
// seconds, both of which may be missing.
func ofNow(q url.Values, now time.Time) bool {
	at := func(name string, normal int64) int64 {
		if n, err := strconv.ParseInt(q.Get(name), 10, 64); err == nil {
			return n
		}
		return normal
	}
	return at("start", 0) <= now.Unix() && at("end", now.Unix()) >= now.Add(-bucket).Unix()
}

// sandboxMetrics is GET /sandboxes/{id}/metrics. Cove keeps no history: it is what
// is used now, one measurement, and nothing of any other time.
func (d *dialect) sandboxMetrics(w http.ResponseWriter, r *http.Request) error {
	sb, err := d.live(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	if !ofNow(r.URL.Query(), d.clock()) || sb.Standby != sandbox.Awake {
		return writeJSON(w, http.StatusOK, []any{})
	}
	m, err := d.measure(r.Context(), sb)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, []any{m.wire()})
}

func (m metric) wire() map[string]any {
	return map[string]any{"timestamp": m.at, "timestampUnix": m.at.Unix(), "cpuCount": int(m.cpus), "cpuUsedPct": m.cpuPct,
		"memUsed": m.memUsed, "memTotal": m.memTotal, "memCache": 0, "diskUsed": m.diskUsed, "diskTotal": m.diskAt}
}

// mostMeasured sandboxes one call asks for; E2B's bound.
const mostMeasured = 100

// manyMetrics is GET /sandboxes/metrics?sandbox_ids=A,B: what each uses now. What is not
// there, or asleep, has none.
func (d *dialect) manyMetrics(w http.ResponseWriter, r *http.Request) error {
	var ids []string
	for _, list := range r.URL.Query()["sandbox_ids"] {
		ids = append(ids, strings.Split(list, ",")...)
	}
	if len(ids) > mostMeasured {
		return sandbox.InvalidField("sandbox_ids", "%d sandboxes; at most %d are accepted", len(ids), mostMeasured)
	}
	var mu sync.Mutex
	out := map[string]any{}
	var all sync.WaitGroup
	for _, id := range ids {
		all.Go(func() { // each takes a sample's time
			sb, err := d.live(r.Context(), id)
			if err != nil || sb.Standby != sandbox.Awake {
				return
			}
			if m, err := d.measure(r.Context(), sb); err == nil {
				mu.Lock()
				defer mu.Unlock()
				out[sb.ID] = m.wire()
			}
		})
	}
	all.Wait()
	return writeJSON(w, http.StatusOK, map[string]any{"sandboxes": out})
}

// agentMetrics is GET /metrics of a sandbox.
func (d *dialect) agentMetrics(w http.ResponseWriter, r *http.Request) error {
	m, err := d.measure(r.Context(), meant(r.Context()).sandbox)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, map[string]any{"ts": m.at.Unix(), "cpu_count": int(m.cpus), "cpu_used_pct": m.cpuPct, "mem_total": m.memTotal,
		"mem_used": m.memUsed, "mem_cache": 0, "disk_used": m.diskUsed, "disk_total": m.diskAt})
}
