package graph_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/simple-workflow/simple-workflow/graph"
)

// What the builder writes is what an author would have written in JSON.
func TestBuilder(t *testing.T) {
	g := graph.Build("order", 3).Output("steps.pay")
	reserve := g.Do("reserve", "inventory.reserve.v1")
	pay := g.Do("pay", "billing.charge.v1").In("amount", "input.total").Out("id", "result.id").Attempts(5)
	other := g.Do("otherCard", "billing.ask.v1")
	giveUp := g.Throw("giveUp", "NOT_PAID")
	size := g.Choose("size")
	wrap, label := g.Do("wrap", "pack.wrap.v1"), g.Do("label", "pack.label.v1")
	split := g.Fork("split", wrap, label)
	packed := g.Join("packed")
	post := g.Wait("post", 36*time.Hour)
	extras := g.Any("extras")
	card, gift := g.Do("card", "pack.card.v1"), g.Do("gift", "pack.gift.v1")
	added := g.Join("added").Taken()
	done := g.End("done")

	g.Start(reserve).Then(pay)
	pay.OnError("DECLINED", other).OnError("*", giveUp).Then(size)
	other.Then(pay)
	size.When("input.items.size() > 1", split).Else(post)
	wrap.Then(packed)
	label.Then(packed)
	g.Path(packed, post, extras)
	extras.When("input.card", card).When("input.gift", gift).Else(added)
	card.Then(added)
	gift.Then(added)
	added.Then(done)

	d, err := g.Definition()
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Join(strings.Fields(`{"process":"order","version":3,"start":"reserve","output":"steps.pay","nodes":{
		"added":{"join":"taken","to":"done"},
		"card":{"do":"pack.card.v1","to":"added"},
		"done":{"end":true},
		"extras":{"any":[{"if":"input.card","to":"card"},{"if":"input.gift","to":"gift"}],"else":"added"},
		"gift":{"do":"pack.gift.v1","to":"added"},
		"giveUp":{"throw":{"error":"NOT_PAID"}},
		"label":{"do":"pack.label.v1","to":"packed"},
		"otherCard":{"do":"billing.ask.v1","to":"pay"},
		"packed":{"join":"all","to":"post"},
		"pay":{"do":"billing.charge.v1","in":{"amount":"input.total"},"out":{"id":"result.id"},"attempts":5,
			"on":[{"error":"DECLINED","to":"otherCard"},{"error":"*","to":"giveUp"}],"to":"size"},
		"post":{"wait":"P1DT12H","to":"extras"},
		"reserve":{"do":"inventory.reserve.v1","to":"pay"},
		"size":{"choose":[{"if":"input.items.size()>1","to":"split"}],"else":"post"},
		"split":{"fork":["wrap","label"]},
		"wrap":{"do":"pack.wrap.v1","to":"packed"}}}`), "")
	if got := strings.ReplaceAll(asJSON(t, d), " ", ""); got != want {
		t.Errorf("%s, want\n%s", got, want)
	}
}

// Joins for some tokens, waits for a time and an early end are built as well.
func TestBuilderForms(t *testing.T) {
	g := graph.Build("forms", 1)
	a, b, c := g.Do("a", "x.y"), g.Do("b", "x.y"), g.Do("c", "x.y")
	two, first := g.Join("two").Need(2), g.Join("first").Need(1).CancelRest()
	opens, over := g.WaitUntil("opens", "input.opens"), g.Terminate("over")
	g.Start(g.Fork("all", a, b, c))
	a.Then(two)
	b.Then(two)
	c.Then(first)
	two.Then(first)
	g.Path(first, opens, over)
	d, err := g.Definition()
	if err != nil {
		t.Fatal(err)
	}
	text := asJSON(t, d)
	for _, part := range []string{
		`"two":{"join":{"need":2},"to":"first"}`, `"first":{"join":{"need":1,"rest":"cancel"},"to":"opens"}`,
		`"opens":{"wait":{"until":"input.opens"},"to":"over"}`, `"over":{"terminate":true}`,
	} {
		if !strings.Contains(text, part) {
			t.Errorf("%s lacks %s", text, part)
		}
	}
}

// Every verb and handler there is can be built.
func TestBuilderOfEverything(t *testing.T) {
	g := graph.Build("everything", 1)
	charge := g.Do("charge", "billing.charge.v1").Undo("billing.refund.v1")
	ask := g.Human("ask", "support", "sales").Assignee("input.agent").Due(4*time.Hour).In("order", "input.id").Out("ok", "result.ok")
	ship := g.Call("ship", "shipping").Version(2).Undo("propagate").In("order", "input.id")
	pack := g.Each("pack", "input.items", "pack.item.v1").Limit(4).Need(3).CancelRest().In("item", "item").Attempts(2)
	late, paid, recalled := g.Wait("late", time.Hour), g.Await("paid", "paid", "input.id"), g.AwaitSignal("recalled", "recall")
	first := g.Race("first", late, paid, recalled)
	remind, undo := g.Do("remind", "mail.remind.v1"), g.Compensate("undo")
	inner := g.Scope("inner", func(s *graph.Part) {
		one := s.Do("one", "x.y")
		s.Start(one).Then(s.Scope("deeper", func(s *graph.Part) { s.Start(s.End("two")) }))
	})
	g.Start(charge).Then(ask)
	ask.After(30*time.Minute, undo).After(time.Hour, remind).Keep().Every(10*time.Minute, remind).Times(3)
	ask.OnMessage("withdrawn", "input.id", undo).OnMessage("changed", "input.id", remind).Keep()
	g.Path(ask, ship, pack, inner, first)
	inner.OnError("*", undo)
	want := `{"process":"everything","version":1,"start":"charge","nodes":{` + strings.Join([]string{
		`"ask":{"human":{"assignee":"input.agent","groups":["support","sales"],"due":"PT4H"},"in":{"order":"input.id"},"out":{"ok":"result.ok"},` +
			`"on":[{"after":"PT30M","to":"undo"},{"after":"PT1H","keep":true,"to":"remind"},{"every":"PT10M","times":3,"to":"remind"},` +
			`{"message":"withdrawn","key":"input.id","to":"undo"},{"message":"changed","key":"input.id","keep":true,"to":"remind"}],"to":"ship"}`,
		`"charge":{"do":"billing.charge.v1","undo":"billing.refund.v1","to":"ask"}`,
		`"first":{"race":["late","paid","recalled"]}`,
		`"inner":{"scope":{"start":"one","nodes":{"deeper":{"scope":{"start":"two","nodes":{"two":{"end":true}}}},"one":{"do":"x.y","to":"deeper"}}},` +
			`"on":[{"error":"*","to":"undo"}],"to":"first"}`,
		`"late":{"wait":"PT1H"}`,
		`"pack":{"each":{"list":"input.items","do":"pack.item.v1","limit":4,"need":3,"rest":"cancel"},"in":{"item":"item"},"attempts":2,"to":"inner"}`,
		`"paid":{"await":{"message":"paid","key":"input.id"}}`,
		`"recalled":{"await":{"signal":"recall"}}`,
		`"remind":{"do":"mail.remind.v1"}`,
		`"ship":{"call":{"process":"shipping","version":2,"undo":"propagate"},"in":{"order":"input.id"},"to":"pack"}`,
		`"undo":{"throw":{"compensate":true}}`,
	}, ",") + `}}`
	text := asJSON(t, graph.Draft(g))
	if text != want {
		t.Errorf("%s, want\n%s", text, want)
	}
	d, err := graph.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if again := asJSON(t, d); again != text {
		t.Errorf("%s became %s", text, again)
	}
}

// A definition that was returned is not changed by what is built afterwards.
func TestBuilderGoesOn(t *testing.T) {
	g := graph.Build("p", 1)
	a := g.Do("a", "x.y").In("k", "1")
	g.Start(a)
	before, err := g.Definition()
	if err != nil {
		t.Fatal(err)
	}
	text := asJSON(t, before)
	a.Attempts(7).In("l", "2").Then(g.End("over"))
	after, err := g.Definition()
	if err != nil {
		t.Fatal(err)
	}
	if asJSON(t, before) != text || asJSON(t, after) == text {
		t.Errorf("%s became %s; later %s", text, asJSON(t, before), asJSON(t, after))
	}
}

// Mistakes are told by Definition, all at once, each once, together with what Compile finds.
func TestBuilderMistakes(t *testing.T) {
	for _, row := range []struct {
		build func(g *graph.Builder, a *graph.Place)
		want  string
	}{
		{func(g *graph.Builder, _ *graph.Place) { g.Do("a", "x.z") }, "/nodes/a DUPLICATE_NAME"},
		{func(_ *graph.Builder, a *graph.Place) { a.Then(nil) }, "/nodes/a/to NO_TARGET"},
		{func(g *graph.Builder, a *graph.Place) { g.Path(nil, a) }, "/nodes NO_TARGET"},
		{func(g *graph.Builder, a *graph.Place) { a.Then(graph.Build("q", 1).End("over")) }, "/nodes/a/to FOREIGN_NODE"},
		{func(g *graph.Builder, a *graph.Place) { a.Then(a).Then(g.End("over")) }, "/nodes/a/to TWO_EDGES"},
		{func(g *graph.Builder, a *graph.Place) {
			c, over := g.Choose("c"), g.End("over")
			a.Then(c)
			c.When("true", a).Else(over).Else(a)
		}, "/nodes/c/else TWO_EDGES"},
		{func(g *graph.Builder, _ *graph.Place) { g.Start(g.End("over")) }, "/start TWO_STARTS"},
		{func(g *graph.Builder, a *graph.Place) { a.Then(g.Fork("f", nil, a)) }, "/nodes/f/fork/0 NO_TARGET"},
		{func(_ *graph.Builder, a *graph.Place) { a.In("k", "1").In("k", "2") }, "/nodes/a/in/k DUPLICATE_KEY"},
		{func(_ *graph.Builder, a *graph.Place) { a.Attempts(0) }, "/nodes/a/attempts ATTEMPTS"},
		{func(_ *graph.Builder, a *graph.Place) { a.Attempts(-1) }, "/nodes/a/attempts ATTEMPTS"},
		{func(_ *graph.Builder, a *graph.Place) { a.When("true", a) }, "/nodes/a MISPLACED"},
		{func(_ *graph.Builder, a *graph.Place) { a.Taken() }, "/nodes/a MISPLACED"},
		{func(_ *graph.Builder, a *graph.Place) { a.Need(2) }, "/nodes/a MISPLACED"},
		{func(_ *graph.Builder, a *graph.Place) { a.Need(0) }, "/nodes/a NEED"},
		{func(_ *graph.Builder, a *graph.Place) { a.CancelRest() }, "/nodes/a MISPLACED"},
		{func(_ *graph.Builder, a *graph.Place) { a.Due(time.Hour) }, "/nodes/a MISPLACED"},
		{func(_ *graph.Builder, a *graph.Place) { a.Assignee("input.a") }, "/nodes/a MISPLACED"},
		{func(_ *graph.Builder, a *graph.Place) { a.Version(1) }, "/nodes/a MISPLACED"},
		{func(_ *graph.Builder, a *graph.Place) { a.Limit(1) }, "/nodes/a MISPLACED"},
		{func(_ *graph.Builder, a *graph.Place) { a.Times(1) }, "/nodes/a MISPLACED"},
		{func(_ *graph.Builder, a *graph.Place) { a.Keep() }, "/nodes/a MISPLACED"},
		{func(_ *graph.Builder, a *graph.Place) { a.Else(a) }, "/nodes/a/else MISPLACED"},
		{func(g *graph.Builder, a *graph.Place) { a.Then(g.Wait("w", -time.Hour)) }, "/nodes/w/wait DURATION"},
		{func(g *graph.Builder, a *graph.Place) { a.Then(g.Wait("w", 20*365*24*time.Hour)) }, "/nodes/w/wait DURATION"},
		{func(g *graph.Builder, a *graph.Place) { a.Then(g.WaitUntil("w", "")) }, "/nodes/w/wait/until EXPRESSION"},
		{func(g *graph.Builder, a *graph.Place) { a.Then(g.Join("j").Taken().Need(1)) }, "/nodes/j MISPLACED"},
		{func(g *graph.Builder, _ *graph.Place) { g.End("over") }, "/nodes/over UNREACHABLE"},
		{func(g *graph.Builder, a *graph.Place) {
			a.Attempts(2000).Then(nil).OnError("E", graph.Build("q", 1).End("over"))
			g.Choose("c")
		}, "/nodes/a/attempts ATTEMPTS /nodes/a/on/0/to FOREIGN_NODE /nodes/a/to NO_TARGET /nodes/c/choose NO_WAY"},
	} {
		g := graph.Build("p", 1)
		a := g.Do("a", "x.y")
		g.Start(a)
		row.build(g, a)
		var got []string
		for _, f := range mistakes(t, g) {
			got = append(got, f.Path+" "+f.Code)
			if f.Note || f.Reason == "" || f.Fix == "" {
				t.Errorf("%+v", f)
			}
		}
		if text := strings.Join(got, " "); text != row.want {
			t.Errorf("found %s, want %s", text, row.want)
		}
	}
}

func mistakes(t *testing.T, g *graph.Builder) []graph.Finding {
	t.Helper()
	d, err := g.Definition()
	var invalid *graph.InvalidError
	if d != nil || !errors.As(err, &invalid) {
		t.Fatalf("%v, error %v", d, err)
	}
	return invalid.Findings
}

// A process without a start, and edges that leave a scope, are mistakes; the sentence after a
// start that is nil can be finished all the same.
func TestBuilderOfParts(t *testing.T) {
	g := graph.Build("p", 1)
	g.Start(nil).Then(g.End("over"))
	if found := fmt.Sprint(mistakes(t, g)); !strings.Contains(found, "/start: NO_TARGET") || strings.Contains(found, "NO_START") {
		t.Error(found)
	}
	g = graph.Build("p", 1)
	g.End("over")
	if found := fmt.Sprint(mistakes(t, g)); !strings.Contains(found, "/start: NO_START") {
		t.Error(found)
	}
	g = graph.Build("p", 1)
	outside := g.Do("outside", "x.y")
	var inside *graph.Place
	scope := g.Scope("scope", func(s *graph.Part) {
		inside = s.Do("inside", "x.y").Then(outside)
		s.Start(inside)
	})
	g.Start(outside).Then(inside)
	outside.OnError("*", scope)
	found := fmt.Sprint(mistakes(t, g))
	for _, path := range []string{"/nodes/outside/to", "/nodes/scope/scope/nodes/inside/to"} {
		if strings.Count(found, path+": EDGE_ACROSS_SCOPES") != 1 {
			t.Errorf("found %s, want EDGE_ACROSS_SCOPES at %s", found, path)
		}
	}
}
