package server

import (
	"encoding/json"
	"io"
	"strings"
	"testing"
)

func jsonBody(s string) io.Reader { return strings.NewReader(s) }

// What the README's curl does, with net/http only: no generated code.
func TestPlainJSON(t *testing.T) {
	w := newWorld(t)
	post := func(path, body string) (int, map[string]any) {
		t.Helper()
		resp, text := w.http("POST", path, jsonBody(body), "Content-Type", "application/json", "Accept-Encoding", "gzip")
		if enc := resp.Header.Get("Content-Encoding"); enc != "" {
			t.Errorf("%s: the answer is encoded: %s", path, enc)
		}
		var m map[string]any
		if err := json.Unmarshal([]byte(text), &m); err != nil {
			t.Fatalf("%s: %q: %v", path, text, err)
		}
		return resp.StatusCode, m
	}
	status, r := post("/cove.v1.Sandboxes/Create", `{"spec":{"image":"base","resources":{"cpu":0.5,"memory":"268435456"},"timeout":"3600s"}}`)
	if status != 200 {
		t.Fatal(status, r)
	}
	sb := r["sandbox"].(map[string]any)
	if sb["state"] != "SANDBOX_STATE_RUNNING" || sb["spec"].(map[string]any)["timeout"] != "3600s" {
		t.Errorf("got %v", sb)
	}

	for body, want := range map[string]string{
		`{"spec":{"memroy":1}}`:                    `unknown field "memroy"`,
		`{"spec":{"timeout":"soon"}}`:              "spec.timeout: ",
		`{"spec":{"resources":{"memory":"lots"}}}`: "spec.resources.memory: ",
		`{"spec":{"idleTimeout":7}}`:               "spec.idle_timeout: ",
		`{"spec":{"env":["a"]}}`:                   "spec.env: ",
		`{"spec":7}`:                               "spec: ",
		`{"spec":`:                                 "unmarshal",
		``:                                         "{}",
		`{"spec":{"timeout":"-5s"}}`:               "spec.timeout",
		`{"spec":{"labels":{"a b":"c"}}}`:          "spec.labels",
	} {
		status, r := post("/cove.v1.Sandboxes/Create", body)
		if status != 400 || r["code"] != "invalid_argument" || !strings.Contains(r["message"].(string), want) {
			t.Errorf("%s: %d %v", body, status, r)
		}
	}

	// The detail is readable without protobuf.
	status, r = post("/cove.v1.Sandboxes/Create", `{"spec":{"image":"bse"}}`)
	if status != 404 || r["message"] != "no image 'bse'; did you mean 'base'?" {
		t.Errorf("%d %v", status, r)
	}
	detail := r["details"].([]any)[0].(map[string]any)
	debug := detail["debug"].(map[string]any)
	if detail["type"] != "cove.v1.ErrorDetail" || debug["code"] != "image_not_found" || debug["op"] != "sandbox.create" || debug["hint"] == "" {
		t.Errorf("detail %v", detail)
	}

	// The errors of plain HTTP look the same.
	resp, text := w.http("GET", "/v1/sandboxes/nosuch/files?path=/x", nil)
	var m map[string]any
	if err := json.Unmarshal([]byte(text), &m); err != nil || resp.StatusCode != 404 || m["code"] != "not_found" {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
	if resp, text := w.http("GET", "/v1/nothing", nil); resp.StatusCode != 501 || !strings.Contains(text, "/v1/nothing") {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
}
