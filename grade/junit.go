package grade

import (
	"bytes"
	"cmp"
	"encoding/xml"
	"errors"
	"io"
	"strconv"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// maxDepth of elements; JUnit has four.
const maxDepth = 64

// JUnit reads a report in JUnit's XML, token by token: nothing is built that the
// file could make large. Declarations of types and entities are refused, so that
// none is ever resolved.
func JUnit(data []byte, expected []string) Outcome {
	d := xml.NewDecoder(bytes.NewReader(data))
	d.Strict = true
	var tests []sandbox.TestResult
	var now *sandbox.TestResult
	depth, suites, broken := 0, false, 0 // broken: failures that a suite counts
	for {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return failed("$COVE_RESULTS is no JUnit report: %v", err)
		}
		switch t := tok.(type) {
		case xml.Directive:
			return failed("the JUnit report declares types or entities, which is not accepted")
		case xml.EndElement:
			if depth--; t.Name.Local == "testcase" && now != nil {
				tests, now = append(tests, *now), nil
			}
		case xml.StartElement:
			if depth++; depth > maxDepth {
				return failed("the JUnit report is nested too deeply")
			}
			switch t.Name.Local {
			case "testsuites", "testsuite":
				suites = true
				for _, name := range []string{"failures", "errors"} {
					n, _ := strconv.Atoi(attr(t, name)) // what is no number counts nothing
					broken = max(broken, n)
				}
			case "testcase":
				if now != nil {
					return failed("the JUnit report has a test within a test")
				}
				now = testcase(t)
			case "failure", "error", "skipped", "rerunFailure":
				if now == nil {
					continue
				}
				outcome := map[string]string{"failure": "failed", "error": "error", "skipped": "skipped", "rerunFailure": "failed"}[t.Name.Local]
				if rank[outcome] > rank[now.Outcome] {
					now.Outcome, now.Message = outcome, message(attr(t, "message"))
				}
			}
		}
	}
	if !suites || now != nil {
		return failed("$COVE_RESULTS is no whole JUnit report")
	}
	out := among(tests, expected, true)
	if broken > 0 && out.Reward > 0 { // a set-up that fails is in no test
		out.spoil("every test of the report passed, and a suite of it counts %d that did not", broken)
	}
	return out
}

func testcase(e xml.StartElement) *sandbox.TestResult {
	id := attr(e, "name")
	if class := attr(e, "classname"); class != "" {
		id = class + "::" + id
	}
	s, _ := strconv.ParseFloat(attr(e, "time"), 64) // a time that is none is 0
	outcome := "passed"
	switch strings.ToLower(cmp.Or(attr(e, "result"), attr(e, "status"))) { // as gtest, ctest and others say it
	case "failed", "failure", "fail", "error":
		outcome = "failed"
	case "skipped", "suppressed", "disabled", "notrun":
		outcome = "skipped"
	}
	return &sandbox.TestResult{ID: clip(id), Outcome: outcome, Duration: seconds(s)}
}

func attr(e xml.StartElement, name string) string {
	for _, a := range e.Attr {
		if a.Name.Local == name {
			return a.Value
		}
	}
	return ""
}
