package victim

import "testing"

func TestWhoEndsWhenMemoryDoes(t *testing.T) {
	const mib = 1 << 20
	for name, c := range map[string]struct {
		ps   []Process
		want int
	}{
		"nobody there":                       {nil, -1},
		"the largest":                        {[]Process{{Resident: 10 * mib}, {Resident: 300 * mib}, {Resident: 20 * mib}}, 1},
		"the first of equals":                {[]Process{{Resident: mib}, {Resident: mib}}, 0},
		"never init":                         {[]Process{{Resident: 300 * mib, Init: true}, {Resident: mib}}, 1},
		"nobody but init":                    {[]Process{{Resident: 300 * mib, Init: true}}, -1},
		"one without memory is no":           {[]Process{{Resident: 0, Adjust: 1000}}, -1},
		"one that offers itself":             {[]Process{{Resident: 300 * mib}, {Resident: mib, Adjust: 1000}}, 1},
		"one that is worth more":             {[]Process{{Resident: 300 * mib, Adjust: -500}, {Resident: 100 * mib}}, 1},
		"one that asks for it is spared":     {[]Process{{Resident: 300 * mib, Adjust: -1000}, {Resident: mib}}, 1},
		"when all ask for it, the largest":   {[]Process{{Resident: mib, Adjust: -1000}, {Resident: 2 * mib, Adjust: -1000}}, 1},
		"all worth more: the least of those": {[]Process{{Resident: 100 * mib, Adjust: -900}, {Resident: mib, Adjust: -999}}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Choose(c.ps, 512*mib); got != c.want {
				t.Errorf("Choose(%+v) = %d, want %d", c.ps, got, c.want)
			}
		})
	}
}
