package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
	"testing"
)

// What a lock guards is read off the code: the fields are in an anonymous struct
// with it, "mu struct { sync.Mutex; ... }", and are used as x.mu.field. A lock that
// guards no field has the name of the action it serialises, and a comment.
func TestGuardedFieldsSitWithTheirLock(t *testing.T) {
	locks := 0
	eachFile(t, func(_ string, fset *token.FileSet, f *ast.File) {
		locks += checkLocks(f, func(at token.Pos, why string) { t.Errorf("%s: %s", fset.Position(at), why) })
	})
	if locks < 50 {
		t.Errorf("only %d locks were found: the test would prove nothing", locks)
	}
}

// checkLocks reports the locks of a file that do not keep the rule, and counts all.
func checkLocks(f *ast.File, report func(at token.Pos, why string)) (locks int) {
	imports := importNames(f)
	isLock := func(e ast.Expr) bool {
		if p, ok := e.(*ast.StarExpr); ok {
			e = p.X
		}
		sel, ok := e.(*ast.SelectorExpr)
		if !ok || sel.Sel.Name != "Mutex" && sel.Sel.Name != "RWMutex" {
			return false
		}
		id, ok := sel.X.(*ast.Ident)
		return ok && imports[id.Name] == "sync"
	}
	named := map[ast.Expr]bool{} // the struct types that are declared with a name
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.TypeSpec:
			named[n.Type] = true
		case *ast.StructType:
			for _, field := range n.Fields.List {
				if !isLock(field.Type) {
					continue
				}
				locks++
				if len(field.Names) == 0 && named[n] {
					report(field.Pos(), "a lock that everybody who has the value can take; put it and what it guards into a mu struct")
				}
				for _, name := range field.Names {
					switch {
					case strings.HasSuffix(strings.ToLower(name.Name), "mu"):
						report(name.Pos(), "what does "+name.Name+" guard? The fields are with it in a mu struct; if it guards none, it is named after what it serialises")
					case field.Doc == nil && field.Comment == nil:
						report(name.Pos(), "a comment says what "+name.Name+" serialises")
					}
				}
			}
		}
		return true
	})
	return locks
}

func TestLocksAreChecked(t *testing.T) {
	for _, c := range []struct {
		fields string
		faults int
	}{
		{"mu struct { sync.Mutex; n int }", 0},
		{"mu struct { sync.RWMutex; n int }", 0},
		{"making sync.Mutex // one is made at a time", 0},
		{"// one is made at a time\n making sync.Mutex", 0},
		{"stripes [4]sync.Mutex", 0},
		{"making sync.Mutex", 1},
		{"mu sync.Mutex // guards n\n n int", 1},
		{"mu *sync.RWMutex\n n int", 1},
		{"wmu sync.Mutex // one write at a time", 1},
		{"readMu, mu sync.Mutex", 2},
		{"sync.Mutex\n n int", 1},
		{"*sync.Mutex\n n int", 1},
		{"of struct { mu sync.Mutex; n int }", 1},
	} {
		f, err := parser.ParseFile(token.NewFileSet(), "", "package p\nimport \"sync\"\ntype s struct {\n"+c.fields+"\n}\n", parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		var faults []string
		checkLocks(f, func(_ token.Pos, why string) { faults = append(faults, why) })
		if len(faults) != c.faults {
			t.Errorf("%q: %q, want %d", c.fields, faults, c.faults)
		}
	}
}
