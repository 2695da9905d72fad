-- Counts one client's requests and tokens of one limit, in one value:
--   "<end of the request window> <requests> <end of the token window> <tokens>"
-- Ends are in ms since the Unix epoch by the server's clock, which alone decides
-- in which window a request falls. Works from Redis 6.2 on.

local at_r, requests, at_t, tokens = 0, 0, 0, 0
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'string' then
  local a, b, c, d = string.match(value, '^(%d+) (%d+) (%d+) (%d+)$')
  value = a -- what somebody else wrote there counts as nothing, and is replaced
  if a then at_r, requests, at_t, tokens = tonumber(a), tonumber(b), tonumber(c), tonumber(d) end
else
  value = nil
end

local function write()
  redis.call('SET', KEYS[1], string.format('%.0f %.0f %.0f %.0f', at_r, requests, at_t, tokens),
    'PXAT', string.format('%.0f', math.max(at_r, at_t)))
end

if ARGV[1] == 'settle' then
  -- end of the token window, difference
  if not value or at_t ~= tonumber(ARGV[2]) then return 0 end
  tokens = math.max(tokens + tonumber(ARGV[3]), 0)
  write()
  return 1
end

-- reserve: request limit and window, token limit and window (0: no limit), cost;
-- then, each as the end of a window and what is used of it: requests and tokens
-- that the caller has seen used, requests and tokens that it admitted alone and
-- has not told yet.
local limit_r, window_r = tonumber(ARGV[2]), tonumber(ARGV[3])
local limit_t, window_t = tonumber(ARGV[4]), tonumber(ARGV[5])
local cost = tonumber(ARGV[6])

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lost, told = 0, false

-- A window begins where the last is over; one that lies ahead of a clock that
-- went back goes on. What a caller has seen used and the server has not was lost
-- by a restart or a failover: it is counted again.
if window_r > 0 then
  local till = now - now % window_r + window_r
  if at_r < till then at_r, requests = till, 0 end
  if at_r == tonumber(ARGV[7]) and requests < tonumber(ARGV[8]) then
    requests, lost = tonumber(ARGV[8]), 1
  end
  if at_r == tonumber(ARGV[11]) and tonumber(ARGV[12]) > 0 then
    requests, told = requests + tonumber(ARGV[12]), true
  end
end
-- Tokens go down too, by being settled; so only a value that is not there at all
-- is known to be lost.
if window_t > 0 then
  local till = now - now % window_t + window_t
  if at_t < till then at_t, tokens = till, 0 end
  if not value and at_t == tonumber(ARGV[9]) and tokens < tonumber(ARGV[10]) then
    tokens, lost = tonumber(ARGV[10]), 1
  end
  if at_t == tonumber(ARGV[13]) and tonumber(ARGV[14]) > 0 then
    tokens, told = tokens + tonumber(ARGV[14]), true
  end
end

local refused = 0
if window_r > 0 and requests >= limit_r then
  refused = 1
elseif window_t > 0 and tokens + cost > limit_t then
  refused = 2
else
  if window_r > 0 then requests = requests + 1 end
  if window_t > 0 then tokens = tokens + cost end
end
if refused == 0 or lost == 1 or told then
  write()
end
return {refused, at_r, requests, at_t, tokens, now, lost}
