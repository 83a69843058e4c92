package sandbox

import (
	"strconv"
	"time"
)

// Plan is what a run will start sandboxes from next, so that a node gets it ready
// before it is asked for.
type Plan struct {
	Version   int64      `json:"version"` // of the run's plans: 1, 2, …
	Items     []PlanItem `json:"items"`
	CreatedAt time.Time  `json:"created_at"`
	// Operator: who made it may pull with the credentials of the server's machine.
	Operator bool `json:"operator,omitempty"`
}

// PlanItem is one origin of sandboxes, and how many there will be of it.
type PlanItem struct {
	Image    string `json:"image,omitempty"` // one that is not there is pulled
	Template string `json:"template,omitempty"`
	Snapshot string `json:"snapshot,omitempty"`
	Count    int    `json:"count"`
}

// Bounds of a plan.
const (
	MaxPlanItems = 256
	MaxPlanCount = 100_000
)

// ValidatePlan checks the items of a plan.
func ValidatePlan(items []PlanItem) error {
	if len(items) > MaxPlanItems {
		return InvalidField("items", "there are %d; at most %d are accepted", len(items), MaxPlanItems)
	}
	for i, it := range items {
		field := func(name string) string { return "items[" + strconv.Itoa(i) + "]." + name }
		sources := 0
		for _, s := range []string{it.Image, it.Template, it.Snapshot} {
			if s != "" {
				sources++
			}
		}
		var err error
		switch {
		case sources != 1:
			return InvalidField(field("image"), "an item has one of image, template and snapshot; this has %d", sources)
		case it.Count < 1 || it.Count > MaxPlanCount:
			return InvalidField(field("count"), "%d is not accepted; 1 to %d is", it.Count, MaxPlanCount)
		case it.Image != "":
			err = ValidateImageName(field("image"), it.Image)
		case it.Template != "":
			_, err = ParseTemplateRef(field("template"), it.Template)
		default:
			err = ValidateSnapshotRef(field("snapshot"), it.Snapshot)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
