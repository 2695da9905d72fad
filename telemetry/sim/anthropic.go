package sim

import (
	"errors"
	"net/http"
	"strconv"
)

// messagesAPI speaks Anthropic's messages API.
type messagesAPI struct{}

type anthropicRequest struct {
	Model     string    `json:"model"`
	System    content   `json:"system"`
	Messages  []message `json:"messages"`
	MaxTokens *int64    `json:"max_tokens"`
	Stream    bool      `json:"stream"`
	IgnoreEOS bool      `json:"ignore_eos"` // not Anthropic's; for load generators
	Sim       simFields `json:"fairlead_sim"`
}

func (messagesAPI) parse(body []byte) (job, error) {
	var r anthropicRequest
	if err := decodeBody(body, &r); err != nil {
		return job{}, err
	}
	if r.Model == "" {
		return job{}, errors.New("model: field required")
	}
	if r.MaxTokens == nil {
		return job{}, errors.New("max_tokens: field required")
	}
	maxTokens, err := tokenLimit("max_tokens", r.MaxTokens)
	if err != nil {
		return job{}, err
	}
	n, err := messageBytes(r.Messages)
	if err != nil {
		return job{}, err
	}
	return job{
		model: r.Model, prompt: r.Sim.promptTokens(n + r.System.bytes), maxTokens: maxTokens,
		ignoreEOS: r.IgnoreEOS, forced: r.Sim.OutputTokens, stream: r.Stream,
	}, r.Sim.check()
}

// anthropicErrorType is the API's word for a status.
func anthropicErrorType(status int) string {
	switch status {
	case http.StatusNotFound:
		return "not_found_error"
	case http.StatusRequestEntityTooLarge:
		return "request_too_large"
	case http.StatusTooManyRequests:
		return "rate_limit_error"
	case http.StatusServiceUnavailable:
		return "overloaded_error"
	}
	if status >= 500 {
		return "api_error"
	}
	return "invalid_request_error"
}

func (messagesAPI) fail(buf []byte, status int, err error) []byte {
	buf = append(buf, `{"type":"error","error":{"type":"`...)
	buf = append(buf, anthropicErrorType(status)...)
	buf = append(buf, `","message":`...)
	buf = append(buf, quoteJSON(err.Error())...)
	return append(buf, `}}`...)
}

func (a *answer) anthropicStop() string {
	if a.stops {
		return "end_turn"
	}
	return "max_tokens"
}

func appendAnthropicHead(buf []byte, a *answer) []byte {
	buf = append(buf, `{"id":"msg_`...)
	buf = append(buf, a.id...)
	buf = append(buf, `","type":"message","role":"assistant","model":`...)
	return append(buf, a.model...)
}

func (messagesAPI) whole(buf []byte, a *answer) []byte {
	buf = appendAnthropicHead(buf, a)
	buf = append(buf, `,"content":[{"type":"text","text":"`...)
	buf = a.appendText(buf, 0, a.output)
	buf = append(buf, `"}],"stop_reason":"`...)
	buf = append(buf, a.anthropicStop()...)
	buf = append(buf, `","stop_sequence":null,"usage":{"input_tokens":`...)
	buf = strconv.AppendInt(buf, int64(a.prompt), 10)
	buf = append(buf, `,"output_tokens":`...)
	buf = strconv.AppendInt(buf, int64(a.output), 10)
	return append(buf, `}}`...)
}

func (messagesAPI) open(buf []byte, a *answer) []byte {
	buf = append(buf, "event: message_start\n"+`data: {"type":"message_start","message":`...)
	buf = appendAnthropicHead(buf, a)
	buf = append(buf, `,"content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":`...)
	buf = strconv.AppendInt(buf, int64(a.prompt), 10)
	buf = append(buf, `,"output_tokens":0}}}`+"\n\n"...)
	buf = append(buf, "event: content_block_start\n"+
		`data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}`+"\n\n"...)
	return append(buf, "event: ping\n"+`data: {"type":"ping"}`+"\n\n"...)
}

func (messagesAPI) text(buf []byte, a *answer, from, to int) []byte {
	buf = append(buf, "event: content_block_delta\n"+
		`data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"`...)
	buf = a.appendText(buf, from, to)
	return append(buf, `"}}`+"\n\n"...)
}

func (messagesAPI) close(buf []byte, a *answer) []byte {
	buf = append(buf, "event: content_block_stop\n"+`data: {"type":"content_block_stop","index":0}`+"\n\n"...)
	buf = append(buf, "event: message_delta\n"+`data: {"type":"message_delta","delta":{"stop_reason":"`...)
	buf = append(buf, a.anthropicStop()...)
	buf = append(buf, `","stop_sequence":null},"usage":{"output_tokens":`...)
	buf = strconv.AppendInt(buf, int64(a.output), 10)
	buf = append(buf, `}}`+"\n\n"...)
	return append(buf, "event: message_stop\n"+`data: {"type":"message_stop"}`+"\n\n"...)
}

func (m messagesAPI) breakOff(buf []byte, err error) []byte {
	buf = append(buf, "event: error\ndata: "...)
	buf = m.fail(buf, http.StatusInternalServerError, err)
	return append(buf, "\n\n"...)
}
