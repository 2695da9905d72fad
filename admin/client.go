package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Client reads and changes a running `serve` through its API.
type Client struct {
	base string
	http *http.Client
}

// NewClient talks to the admin API at host:port.
func NewClient(address string) *Client {
	return &Client{base: "http://" + address, http: &http.Client{Timeout: 10 * time.Second}}
}

// Proxies lists the sidecars.
func (c *Client) Proxies(ctx context.Context) ([]Proxy, error) {
	return call[[]Proxy](ctx, c, http.MethodGet, "/api/v1/proxies", nil)
}

// Fleet returns the state of all pools.
func (c *Client) Fleet(ctx context.Context) (Fleet, error) {
	return call[Fleet](ctx, c, http.MethodGet, "/api/v1/fleet", nil)
}

// Clients lists the clients that have most of each pool.
func (c *Client) Clients(ctx context.Context) ([]Caller, error) {
	return call[[]Caller](ctx, c, http.MethodGet, "/api/v1/clients", nil)
}

// Splits lists the routes' splits.
func (c *Client) Splits(ctx context.Context) ([]Split, error) {
	return call[[]Split](ctx, c, http.MethodGet, "/api/v1/splits", nil)
}

// SetSplit sets weights of a route by hand and returns all splits.
func (c *Client) SetSplit(ctx context.Context, route string, weights map[string]uint32) ([]Split, error) {
	return call[[]Split](ctx, c, http.MethodPut, "/api/v1/splits/"+url.PathEscape(route), SetSplit{Weights: weights})
}

// ClearSplit goes back to the file's split and returns all splits.
func (c *Client) ClearSplit(ctx context.Context, route string) ([]Split, error) {
	return call[[]Split](ctx, c, http.MethodDelete, "/api/v1/splits/"+url.PathEscape(route), nil)
}

func call[T any](ctx context.Context, c *Client, method, path string, body any) (T, error) {
	var v T
	var encoded []byte
	if body != nil {
		var err error
		if encoded, err = json.Marshal(body); err != nil {
			return v, err
		}
	}
	request, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(encoded))
	if err != nil {
		return v, err
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	response, err := c.http.Do(request)
	if err != nil {
		return v, fmt.Errorf("ask the serve process at %s (is it running? --admin names another address): %w", strings.TrimPrefix(c.base, "http://"), err)
	}
	defer response.Body.Close()
	if response.StatusCode/100 != 2 {
		var p Problem
		if err := json.NewDecoder(response.Body).Decode(&p); err != nil || p.Error == "" {
			return v, c.foreign(path, response.Status)
		}
		return v, fmt.Errorf("%s", p.Error)
	}
	if err := json.NewDecoder(response.Body).Decode(&v); err != nil {
		return v, fmt.Errorf("%w: %w", c.foreign(path, response.Status), err)
	}
	return v, nil
}

// foreign is the error for an answer that isn't one of the admin API.
func (c *Client) foreign(path, status string) error {
	return fmt.Errorf("%s%s answered %q, not as the admin API of fairlead serve does: is that serve.admin's address? (--admin names another)", c.base, path, status)
}
