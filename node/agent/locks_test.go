package agent

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Nothing that may wait for a disk, a kernel or a guest happens while Node.mu is
// held: every call of every sandbox takes it. The check is lexical: it follows
// Lock and Unlock through the blocks of each function, and takes a function
// whose name ends in Locked to hold the lock. What such a call is, is a list.
func TestNoWaitUnderTheNodesLock(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	regions := 0
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		src, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		found, n := waitsUnderLock(t, name, string(src))
		regions += n
		for _, f := range found {
			t.Error(f)
		}
	}
	if regions < 50 { // else the check looks for the wrong thing
		t.Errorf("found only %d places where the lock is taken", regions)
	}
}

// The check finds what it is to find, and only that.
func TestWaitsUnderLock(t *testing.T) {
	const src = `package agent
func (n *Node) bad() { n.mu.Lock(); defer n.mu.Unlock(); n.journal.append(r) }
func (n *Node) branch() { n.mu.Lock(); if x { n.mu.Unlock(); return }; k.Destroy(ctx); n.mu.Unlock() }
func (n *Node) badLocked() { os.Remove(p) }
func (n *Node) received() { n.mu.Lock(); <-ch; n.mu.Unlock() }
func (n *Node) good() { n.mu.Lock(); n.goLocked(func() { n.journal.append(r) }); n.mu.Unlock(); n.journal.append(r) }
func (c *contents) other() { c.mu.Lock(); n.journal.append(r); c.mu.Unlock() }
`
	found, regions := waitsUnderLock(t, "x.go", src)
	var lines []string
	for _, f := range found {
		lines = append(lines, strings.Split(f, ":")[1])
	}
	if want := []string{"2", "3", "4", "5"}; !slices.Equal(lines, want) || regions != 4 {
		t.Errorf("found lines %v in %d regions, want %v in 4: %v", lines, regions, want, found)
	}
}

// waiting names the calls that may wait: a method or function, or all of a
// package or field with a star.
var waiting = map[string]bool{
	"os.*": true, "syscall.*": true, "unix.*": true, "time.Sleep": true,
	"journal.append": true, "journal.appendFact": true, "Images.*": true, "Networks.*": true, "volumes.*": true, "states.*": true, "mounts.*": true,
	"*.Attach": true, "*.Reset": true, "*.Bulk": true, "*.Pause": true, "*.Resume": true, "*.Checkpoint": true, "*.Restore": true,
	"*.Boot": true, "*.Adopt": true, "*.Sweep": true, "*.Destroy": true, "*.Wait": true, "*.Processes": true, "*.SetEnv": true,
	"n.destroy": true, "n.discard": true, "n.wake": true, "n.thaw": true, "n.own": true, "n.trust": true,
}

func waitsUnderLock(t *testing.T, name, src string) (found []string, regions int) {
	t.Helper()
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, name, src, 0)
	if err != nil {
		t.Fatal(err)
	}
	w := &lockWalk{report: func(n ast.Node, what string) {
		found = append(found, fmt.Sprintf("%s: %s under Node.mu", fset.Position(n.Pos()), what))
	}}
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok || fn.Body == nil {
			continue
		}
		held := fn.Recv != nil && len(fn.Recv.List[0].Names) > 0 && fn.Recv.List[0].Names[0].Name == "n" && strings.HasSuffix(fn.Name.Name, "Locked")
		w.block(fn.Body.List, held)
	}
	return found, w.regions
}

type lockWalk struct {
	report  func(n ast.Node, what string)
	regions int
}

// block follows the statements of a block and says whether the lock is held at
// its end, and whether control gets there.
func (w *lockWalk) block(list []ast.Stmt, held bool) (after, falls bool) {
	for _, s := range list {
		switch s := s.(type) {
		case *ast.ExprStmt:
			switch call := nodeLock(s.X); call {
			case "Lock":
				held = true
				w.regions++
				continue
			case "Unlock":
				held = false
				continue
			}
			w.look(s, held)
		case *ast.DeferStmt: // runs at the end; what it says of the lock changes nothing here
		case *ast.ReturnStmt, *ast.BranchStmt:
			w.look(s, held)
			return held, false
		case *ast.BlockStmt:
			if held, falls = w.block(s.List, held); !falls {
				return held, false
			}
		case *ast.IfStmt:
			w.look(s.Init, held)
			w.look(s.Cond, held)
			then, through := w.block(s.Body.List, held)
			if s.Else != nil {
				w.block([]ast.Stmt{s.Else}, held)
			}
			if through {
				held = then
			}
		case *ast.ForStmt:
			w.look(s.Init, held)
			w.look(s.Cond, held)
			held, _ = w.block(s.Body.List, held)
		case *ast.RangeStmt:
			w.look(s.X, held)
			w.block(s.Body.List, held)
		case *ast.SwitchStmt:
			w.look(s.Init, held)
			w.look(s.Tag, held)
			for _, c := range s.Body.List {
				w.block(c.(*ast.CaseClause).Body, held)
			}
		case *ast.SelectStmt:
			for _, c := range s.Body.List {
				w.block(c.(*ast.CommClause).Body, held)
			}
		default:
			w.look(s, held)
		}
	}
	return held, true
}

// look reports the waits of a statement or expression, and follows the bodies of
// function literals, which run elsewhere or later: without the lock.
func (w *lockWalk) look(n ast.Node, held bool) {
	if n == nil {
		return
	}
	ast.Inspect(n, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncLit:
			w.block(n.Body.List, false)
			return false
		case *ast.UnaryExpr:
			if held && n.Op == token.ARROW {
				w.report(n, "a receive")
			}
		case *ast.CallExpr:
			sel, ok := n.Fun.(*ast.SelectorExpr)
			if !ok || !held {
				break
			}
			of := lastName(sel.X)
			for _, call := range []string{of + "." + sel.Sel.Name, of + ".*", "*." + sel.Sel.Name} {
				if waiting[call] {
					w.report(n, of+"."+sel.Sel.Name)
					break
				}
			}
		}
		return true
	})
}

// nodeLock is Lock or Unlock for a call of n.mu's, also as a field's n.
func nodeLock(e ast.Expr) string {
	call, ok := e.(*ast.CallExpr)
	if !ok {
		return ""
	}
	method, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return ""
	}
	mu, ok := method.X.(*ast.SelectorExpr)
	if !ok || mu.Sel.Name != "mu" || lastName(mu.X) != "n" {
		return ""
	}
	return method.Sel.Name
}

func lastName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}
