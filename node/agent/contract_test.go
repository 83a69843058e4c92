package agent_test

import (
	"testing"

	"github.com/cove-sandbox/cove/node/agent/agenttest"
	"github.com/cove-sandbox/cove/node/nodetest"
	"github.com/cove-sandbox/cove/volume"
)

func TestContract(t *testing.T) {
	nodetest.Run(t, func(t *testing.T) nodetest.World { return contractWorld(t, agenttest.Options{}) })
}

// The same with volumes, where this host can have some.
func TestContractWithVolumes(t *testing.T) {
	if err := volume.Supported(); err != nil {
		t.Skipf("this host cannot have volumes: %v", err)
	}
	nodetest.Run(t, func(t *testing.T) nodetest.World { return contractWorld(t, agenttest.Options{Volumes: true}) })
}

func contractWorld(t *testing.T, opts agenttest.Options) nodetest.World {
	m, err := agenttest.Open(t.Context(), t.TempDir(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	w := nodetest.World{Node: m.Node, Image: agenttest.Image, Remote: "docker.io/library/tiny"}
	w.Loopback()
	return w
}
