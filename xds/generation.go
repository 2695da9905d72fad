package xds

// generations are the resources that are published with other bytes than they
// were built with, because those bytes were in a refused response.
type generations map[generationKey]generation

type generationKey struct{ typeURL, name string }

type generation struct {
	base   string // version of the resource as built
	number uint64
	item   item // as published
}

// one returns the item to publish for a resource as built.
func (gs generations) one(typeURL, name string, built item) item {
	if e, ok := gs[generationKey{typeURL, name}]; ok && e.base == built.version {
		return e.item
	}
	return built
}

// apply returns the items to publish for resources as built.
func (gs generations) apply(typeURL string, built items) items {
	if len(gs) == 0 {
		return built
	}
	out := make(items, len(built))
	for name, it := range built {
		out[name] = gs.one(typeURL, name, it)
	}
	return out
}

// raise gives a resource new bytes.
func (gs generations) raise(typeURL, name string, built item) error {
	key := generationKey{typeURL, name}
	number := gs[key].number + 1
	next, err := newItem(withGeneration(built.msg, number))
	if err != nil {
		return err
	}
	gs[key] = generation{base: built.version, number: number, item: next}
	return nil
}

// keepOnly forgets resources that w doesn't have, or has with other content.
func (gs generations) keepOnly(w *world) {
	for key, e := range gs {
		var built item
		switch key.typeURL {
		case typeCDS:
			built = w.clusters[key.name]
		case typeEDS:
			built = w.endpoints[key.name]
		case typeRDS:
			built = w.routes[key.name]
		case typeLDS:
			continue // one per listening address, so bounded; see one
		}
		if built.version != e.base {
			delete(gs, key)
		}
	}
}

// raiseGenerations gives new bytes to every resource of back that stood in a
// refused response with the very content that back has: the server's
// bookkeeping has it as delivered, the Envoy may not have taken it. The caller
// holds g.mu.
func (g *group) raiseGenerations(back *world) {
	for ses := range g.sessions {
		for typeURL, ts := range ses.types {
			if ts.refused == nil || ts.refused.own || ts.refused.answered {
				continue
			}
			for name, version := range ts.refused.versions {
				if err := g.raiseIfSame(back, ses, typeURL, name, version); err != nil {
					g.server.log.Error("xds generation", "group", g.name, "type", typeURL, "name", name, "error", err)
				}
			}
		}
	}
}

func (g *group) raiseIfSame(back *world, ses *session, typeURL, name, refused string) error {
	var built item
	key := name
	switch typeURL {
	case typeCDS:
		built = back.clusters[name]
	case typeEDS:
		built = back.endpoints[name]
	case typeRDS:
		built = back.routes[name]
	case typeLDS:
		l, err := back.listenerFor(ses.listen)
		if err != nil {
			return err
		}
		built, key = l.item, ses.listen.String()
	}
	if built.msg == nil || g.generations.one(typeURL, key, built).version != refused {
		return nil
	}
	if err := g.generations.raise(typeURL, key, built); err != nil {
		return err
	}
	if assignment, ok := back.endpoints[name]; typeURL == typeCDS && ok {
		// A cluster with new bytes warms until its assignment changes.
		return g.generations.raise(typeEDS, name, assignment)
	}
	return nil
}
