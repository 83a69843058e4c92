package grade

import (
	"encoding/json"
	"strings"
	"testing"
)

// sound is a report of a run that nobody touched.
func sound(change func(m map[string]any)) []byte {
	m := map[string]any{"expected": []string{"t.py::a", "t.py::b"}, "ready": true, "ends": 1, "canaries": 4, "caught": 4, "code": 0,
		"reports": []map[string]any{{"kind": "test", "id": "t.py::a", "when": "call", "outcome": "passed"}, {"kind": "test", "id": "t.py::b[1]", "when": "call", "outcome": "passed"},
			{"kind": "test", "id": "t.py::c", "when": "setup", "outcome": "skipped", "marked": true}}}
	if change != nil {
		change(m)
	}
	b, _ := json.Marshal(m) // strings and numbers
	return b
}

func TestPytest(t *testing.T) {
	add := func(r map[string]any) func(map[string]any) {
		return func(m map[string]any) { m["reports"] = append(m["reports"].([]map[string]any), r) }
	}
	set := func(k string, v any) func(map[string]any) { return func(m map[string]any) { m[k] = v } }
	for name, c := range map[string]struct {
		change func(map[string]any)
		reward float64
		fails  bool // there is no verdict
	}{
		"all passed":              {nil, 1, false},
		"one failed":              {add(map[string]any{"kind": "test", "id": "t.py::d", "when": "call", "outcome": "failed"}), 0, false},
		"a teardown failed":       {add(map[string]any{"kind": "test", "id": "t.py::a", "when": "teardown", "outcome": "failed"}), 0, false},
		"a file did not load":     {add(map[string]any{"kind": "collect", "id": "t.py", "text": "x"}), 0, false},
		"skipped by the work":     {add(map[string]any{"kind": "test", "id": "t.py::a", "when": "call", "outcome": "skipped"}), 0, false},
		"one is missing":          {set("expected", []string{"t.py::a", "t.py::z"}), 0, false},
		"no end":                  {set("ends", 0), 0, false},
		"two ends":                {set("ends", 2), 0, false},
		"a signal":                {set("signal", 9), 0, false},
		"a canary lives":          {set("caught", 3), 0, false},
		"a framework changed":     {set("patched", []string{"_pytest.x"}), 0, false},
		"noise":                   {set("noise", 1), 0, false},
		"an exit code of its own": {set("code", 3), 0, false},
		"never ready":             {set("ready", false), 0, true},
		"no tests":                {set("expected", []string{}), 0, true},
		"tests that do not parse": {set("broken", []string{"t.py: x"}), 0, true},
	} {
		out := Pytest(sound(c.change), nil)
		if (out.Err != nil) != c.fails || out.Reward != c.reward {
			t.Errorf("%s: %+v", name, out)
		}
		if !c.fails && c.reward == 0 && (out.Rewards["pass_rate"] >= 1 || out.Reason == "") {
			t.Errorf("%s: %+v", name, out)
		}
	}
	if out := Pytest(sound(nil), []string{"t.py::a", "t.py::new"}); out.Reward != 0 {
		t.Errorf("what the caller expects: %+v", out)
	}
	if out := Pytest([]byte("{"), nil); out.Err == nil {
		t.Error("half a report")
	}
}

func TestReports(t *testing.T) {
	const head = `<?xml version="1.0"?><testsuites><testsuite name="s">`
	const tail = `</testsuite></testsuites>`
	for name, c := range map[string]struct {
		out    Outcome
		reward float64
		fails  bool
	}{
		"junit":                       {JUnit([]byte(head+`<testcase classname="m" name="a" time="0.5"/><testcase name="b"><skipped/></testcase>`+tail), nil), 1, false},
		"junit, a failure":            {JUnit([]byte(head+`<testcase name="a"/><testcase name="b"><failure message="x"/></testcase>`+tail), nil), 0, false},
		"junit, an error":             {JUnit([]byte(head+`<testcase name="b"><error/></testcase>`+tail), nil), 0, false},
		"junit, missing":              {JUnit([]byte(head+`<testcase name="a"/>`+tail), []string{"b"}), 0, false},
		"junit, an entity":            {JUnit([]byte(`<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]>`+head+`<testcase name="&e;"/>`+tail), nil), 0, true},
		"junit, bombs":                {JUnit([]byte(`<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]>`+head+`<testcase name="&b;"/>`+tail), nil), 0, true},
		"junit, cut off":              {JUnit([]byte(head+`<testcase name="a"/>`), nil), 0, true},
		"junit, nothing":              {JUnit([]byte(head+tail), nil), 0, true},
		"junit, something":            {JUnit([]byte(`<html/>`), nil), 0, true},
		"junit, deep":                 {JUnit([]byte(strings.Repeat("<a>", 1000)), nil), 0, true},
		"junit, nested":               {JUnit([]byte(head+`<testcase name="a"><testcase name="b"/></testcase>`+tail), nil), 0, true},
		"json":                        {PytestJSON([]byte(`{"exitcode":0,"tests":[{"nodeid":"t::a","outcome":"passed"}]}`), nil), 1, false},
		"json, a failure":             {PytestJSON([]byte(`{"exitcode":1,"tests":[{"nodeid":"t::a","outcome":"failed"}]}`), nil), 0, false},
		"json, a new word":            {PytestJSON([]byte(`{"exitcode":1,"tests":[{"nodeid":"t::a","outcome":"splendid"}]}`), nil), 0, false},
		"json, none":                  {PytestJSON([]byte(`{"exitcode":5,"tests":[]}`), nil), 0, true},
		"json, nonsense":              {PytestJSON([]byte(`[]`), nil), 0, true},
		"junit, expected and skipped": {JUnit([]byte(head+`<testcase name="a"/><testcase name="b"><skipped/></testcase>`+tail), []string{"b"}), 0, false},
		"junit, a suite that failed":  {JUnit([]byte(`<testsuite errors="1"><testcase name="a"/></testsuite>`), nil), 0, false},
		"junit, by an attribute":      {JUnit([]byte(head+`<testcase name="a"/><testcase name="b" status="failed"/>`+tail), nil), 0, false},
		"junit, as gtest says it":     {JUnit([]byte(head+`<testcase name="a" status="run" result="completed"/><testcase name="b" status="notrun" result="suppressed"/>`+tail), nil), 1, false},
		"json, stopped amid it":       {PytestJSON([]byte(`{"exitcode":2,"tests":[{"nodeid":"t::a","outcome":"passed"}]}`), nil), 0, false},
		"json, expected and skipped":  {PytestJSON([]byte(`{"exitcode":0,"tests":[{"nodeid":"t::a","outcome":"passed"},{"nodeid":"t::b[1]","outcome":"xfailed"}]}`), []string{"t::b"}), 0, false},
		"json, deep":                  {PytestJSON([]byte(`{"exitcode":0,"tests":`+strings.Repeat("[", 1<<20)), nil), 0, true},
		"null":                        {Reward([]byte("null")), 0, true},
		"a null":                      {Reward([]byte(`{"reward": null}`)), 0, true},
		"more than a number":          {Reward([]byte("1e999")), 0, true},
		"more than numbers":           {Reward([]byte(`{"reward": -1e999}`)), 0, true},
		"Infinity":                    {Reward([]byte("Infinity")), 0, true},
		"two numbers":                 {Reward([]byte("0 1")), 0, true},
		"a number":                    {Reward([]byte(" 0.25\n")), 0.25, false},
		"numbers":                     {Reward([]byte(`{"reward": 0.5, "style": 1}`)), 0.5, false},
		"one number":                  {Reward([]byte(`{"score": 2}`)), 2, false},
		"numbers, nameless":           {Reward([]byte(`{"a": 0.5, "b": 1}`)), 0, true},
		"no number":                   {Reward([]byte(`NaN`)), 0, true},
		"words":                       {Reward([]byte(`{"reward": "1"}`)), 0, true},
		"nothing":                     {Reward(nil), 0, true},
	} {
		if (c.out.Err != nil) != c.fails || c.out.Reward != c.reward {
			t.Errorf("%s: %+v", name, c.out)
		}
	}
}

// What a stranger sends as a report makes no verdict fall over.
func FuzzReports(f *testing.F) {
	f.Add(sound(nil))
	f.Add([]byte(`<testsuite><testcase name="a"/></testsuite>`))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, out := range []Outcome{Pytest(b, nil), JUnit(b, nil), PytestJSON(b, nil), Reward(b)} {
			if out.Err != nil && out.Reward != 0 {
				t.Error(out)
			}
		}
	})
}
