package extproc

import "testing"

func TestSamplingHeadersAreValidatedAndRecorded(t *testing.T) {
	for _, row := range []struct {
		temperature, topK string
		want              Sampling
	}{
		{"0.7", "40", Sampling{Temperature: 0.7, TopK: 40, HasTemperature: true, HasTopK: true}},
		{"0", "-1", Sampling{TopK: -1, HasTemperature: true, HasTopK: true}},
		{" 2 ", " 0 ", Sampling{Temperature: 2, HasTemperature: true, HasTopK: true}},
		{"2.1", "40", Sampling{TopK: 40, HasTopK: true, Invalid: true}},
		{"-0.1", "-2", Sampling{Invalid: true}},
		{"NaN", "4.5", Sampling{Invalid: true}},
		{"hot", "99999999999", Sampling{Invalid: true}},
	} {
		w := newWorld(t)
		w.ask(t, chat(map[string]string{"temperature": row.temperature, "top_k": row.topK}))
		if got := w.lastEvent().Sampling; got != row.want {
			t.Errorf("temperature %q, top_k %q: %+v; want %+v", row.temperature, row.topK, got, row.want)
		}
	}
	w := newWorld(t)
	w.ask(t, chat(nil))
	if got := w.lastEvent().Sampling; got != (Sampling{}) {
		t.Errorf("without headers: %+v", got)
	}
}
