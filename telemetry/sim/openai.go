package sim

import (
	"errors"
	"net/http"
	"strconv"
	"strings"
)

// chatAPI speaks OpenAI's chat completions as vLLM answers them.
type chatAPI struct{}

// openAIRequest holds the fields of both OpenAI paths that matter here.
type openAIRequest struct {
	Model               string    `json:"model"`
	Messages            []message `json:"messages"`
	Prompt              *prompt   `json:"prompt"`
	Stream              bool      `json:"stream"`
	MaxTokens           *int64    `json:"max_tokens"`
	MaxCompletionTokens *int64    `json:"max_completion_tokens"`
	IgnoreEOS           bool      `json:"ignore_eos"`
	StreamOptions       struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	Sim simFields `json:"fairlead_sim"`
}

// job turns the request into a job for a prompt of n bytes. As in vLLM
// max_completion_tokens counts before max_tokens.
func (r *openAIRequest) job(n int) (job, error) {
	name, limit := "max_tokens", r.MaxTokens
	if r.MaxCompletionTokens != nil {
		name, limit = "max_completion_tokens", r.MaxCompletionTokens
	}
	maxTokens, err := tokenLimit(name, limit)
	if err != nil {
		return job{}, err
	}
	return job{
		model: r.Model, prompt: r.Sim.promptTokens(n), maxTokens: maxTokens, ignoreEOS: r.IgnoreEOS,
		forced: r.Sim.OutputTokens, stream: r.Stream, includeUsage: r.StreamOptions.IncludeUsage,
	}, r.Sim.check()
}

func (chatAPI) parse(body []byte) (job, error) {
	var r openAIRequest
	if err := decodeBody(body, &r); err != nil {
		return job{}, err
	}
	n, err := messageBytes(r.Messages)
	if err != nil {
		return job{}, err
	}
	return r.job(n)
}

// openAIErrorType is vLLM's word for a status: its text in one word, such as
// BadRequestError and InternalServerError.
func openAIErrorType(status int) string {
	word := strings.ReplaceAll(http.StatusText(status), " ", "")
	return strings.TrimSuffix(word, "Error") + "Error"
}

func appendOpenAIError(buf []byte, status int, err error) []byte {
	buf = append(buf, `{"error":{"message":`...)
	buf = append(buf, quoteJSON(err.Error())...)
	buf = append(buf, `,"type":"`...)
	buf = append(buf, openAIErrorType(status)...)
	buf = append(buf, `","param":null,"code":`...)
	buf = strconv.AppendInt(buf, int64(status), 10)
	return append(buf, `}}`...)
}

func (chatAPI) fail(buf []byte, status int, err error) []byte {
	return appendOpenAIError(buf, status, err)
}

func appendOpenAIUsage(buf []byte, a *answer) []byte {
	buf = append(buf, `"usage":{"prompt_tokens":`...)
	buf = strconv.AppendInt(buf, int64(a.prompt), 10)
	buf = append(buf, `,"total_tokens":`...)
	buf = strconv.AppendInt(buf, int64(a.prompt+a.output), 10)
	buf = append(buf, `,"completion_tokens":`...)
	buf = strconv.AppendInt(buf, int64(a.output), 10)
	return append(buf, '}')
}

func (a *answer) openAIFinish() string {
	if a.stops {
		return "stop"
	}
	return "length"
}

// appendOpenAIHead appends an object up to, and without, its choices.
func appendOpenAIHead(buf []byte, a *answer, prefix, object string) []byte {
	buf = append(buf, `{"id":"`...)
	buf = append(buf, prefix...)
	buf = append(buf, a.id...)
	buf = append(buf, `","object":"`...)
	buf = append(buf, object...)
	buf = append(buf, `","created":`...)
	buf = strconv.AppendInt(buf, a.created, 10)
	buf = append(buf, `,"model":`...)
	return append(buf, a.model...)
}

func (chatAPI) whole(buf []byte, a *answer) []byte {
	buf = appendOpenAIHead(buf, a, "chatcmpl-", "chat.completion")
	buf = append(buf, `,"choices":[{"index":0,"message":{"role":"assistant","content":"`...)
	buf = a.appendText(buf, 0, a.output)
	buf = append(buf, `"},"logprobs":null,"finish_reason":"`...)
	buf = append(buf, a.openAIFinish()...)
	buf = append(buf, `"}],`...)
	return append(appendOpenAIUsage(buf, a), '}')
}

func (chatAPI) chunk(buf []byte, a *answer) []byte {
	return appendOpenAIHead(append(buf, "data: "...), a, "chatcmpl-", "chat.completion.chunk")
}

func (c chatAPI) open(buf []byte, a *answer) []byte {
	buf = c.chunk(buf, a)
	return append(buf, `,"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}`+"\n\n"...)
}

func (c chatAPI) text(buf []byte, a *answer, from, to int) []byte {
	buf = append(c.chunk(buf, a), `,"choices":[{"index":0,"delta":{"content":"`...)
	buf = a.appendText(buf, from, to)
	return append(buf, `"},"logprobs":null,"finish_reason":null}]}`+"\n\n"...)
}

func (c chatAPI) close(buf []byte, a *answer) []byte {
	buf = append(c.chunk(buf, a), `,"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"`...)
	buf = append(buf, a.openAIFinish()...)
	buf = append(buf, `"}]}`+"\n\n"...)
	if a.usage {
		buf = append(c.chunk(buf, a), `,"choices":[],`...)
		buf = append(appendOpenAIUsage(buf, a), "}\n\n"...)
	}
	return append(buf, openAIDone...)
}

const openAIDone = "data: [DONE]\n\n"

// breakOff ends with [DONE] all the same: vLLM sends it after an error event too.
func (chatAPI) breakOff(buf []byte, err error) []byte {
	buf = append(buf, "data: "...)
	buf = appendOpenAIError(buf, http.StatusInternalServerError, err)
	return append(buf, "\n\n"+openAIDone...)
}

// completionAPI speaks OpenAI's older text completions.
type completionAPI struct{ chatAPI }

// prompt is a string, a list of strings, a list of token ids, or a list of such
// lists.
type prompt struct{ bytes int }

// UnmarshalJSON implements json.Unmarshaler.
func (p *prompt) UnmarshalJSON(data []byte) error {
	var v any
	if err := decodeBody(data, &v); err != nil {
		return err
	}
	n, ok := promptBytes(v, 2)
	if !ok {
		return errors.New("prompt must be a string, a list of strings, or lists of token ids")
	}
	p.bytes = n
	return nil
}

func promptBytes(v any, depth int) (int, bool) {
	switch v := v.(type) {
	case string:
		return len(v), true
	case float64:
		return bytesPerToken, true
	case []any:
		if depth == 0 {
			return 0, false
		}
		total := 0
		for _, part := range v {
			n, ok := promptBytes(part, depth-1)
			if !ok {
				return 0, false
			}
			total += n
		}
		return total, true
	}
	return 0, false
}

func (completionAPI) parse(body []byte) (job, error) {
	var r openAIRequest
	if err := decodeBody(body, &r); err != nil {
		return job{}, err
	}
	if r.Prompt == nil {
		return job{}, errors.New("prompt is required")
	}
	return r.job(r.Prompt.bytes)
}

func (completionAPI) whole(buf []byte, a *answer) []byte {
	buf = appendOpenAIHead(buf, a, "cmpl-", "text_completion")
	buf = append(buf, `,"choices":[{"index":0,"text":"`...)
	buf = a.appendText(buf, 0, a.output)
	buf = append(buf, `","logprobs":null,"finish_reason":"`...)
	buf = append(buf, a.openAIFinish()...)
	buf = append(buf, `"}],`...)
	return append(appendOpenAIUsage(buf, a), '}')
}

func (completionAPI) open(buf []byte, _ *answer) []byte { return buf }

func (completionAPI) chunk(buf []byte, a *answer) []byte {
	return appendOpenAIHead(append(buf, "data: "...), a, "cmpl-", "text_completion")
}

func (c completionAPI) text(buf []byte, a *answer, from, to int) []byte {
	buf = append(c.chunk(buf, a), `,"choices":[{"index":0,"text":"`...)
	buf = a.appendText(buf, from, to)
	return append(buf, `","logprobs":null,"finish_reason":null}]}`+"\n\n"...)
}

func (c completionAPI) close(buf []byte, a *answer) []byte {
	buf = append(c.chunk(buf, a), `,"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"`...)
	buf = append(buf, a.openAIFinish()...)
	buf = append(buf, `"}]}`+"\n\n"...)
	if a.usage {
		buf = append(c.chunk(buf, a), `,"choices":[],`...)
		buf = append(appendOpenAIUsage(buf, a), "}\n\n"...)
	}
	return append(buf, openAIDone...)
}
