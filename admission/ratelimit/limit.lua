-- Counts one client's requests and tokens of one limit. KEYS[1] is the count, which
-- all replicas share:
--   "<end of the request window> <requests> <end of the token window> <tokens>"
-- KEYS[2] is the ledger of the replica that asks: what of that count is its doing. It
-- is missing where the caller asks apart from its account, or has none: a probe.
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

-- write lets a value live until the later of the windows is over.
local function write(key, text)
  redis.call('SET', key, text, 'PXAT', string.format('%.0f', math.max(at_r, at_t)))
end

if ARGV[1] == 'settle' then
  -- end of the token window, difference
  if not value or at_t ~= tonumber(ARGV[2]) then return 0 end
  tokens = math.max(tokens + tonumber(ARGV[3]), 0)
  write(KEYS[1], string.format('%.0f %.0f %.0f %.0f', at_r, requests, at_t, tokens))
  return 1
end

-- reserve; its numbers come packed, and so lies the ledger: read and written as text
-- they took twice the script's time.
local
  -- Request limit and window, token limit and window (0: no limit), cost;
  limit_r, window_r, limit_t, window_t, cost,
  -- the ends of the windows of which the caller has seen something used, and what;
  -- of requests, by who was admitted, and as it last heard, by anybody;
  seen_r, used_r, heard_r, seen_t, used_t,
  -- and the caller's statement: its account's number; this question's epoch, 0 if it
  -- is asked without an account; the last epoch of which the caller knows how each
  -- question ended; the statement's version; the last version that was acknowledged;
  account, epoch, closed, version, acknowledged,
  -- of requests and of tokens: the end of the window that it is about; all that the
  -- caller admitted alone and by answers of closed epochs; what of that it admitted
  -- alone and no answer has acknowledged; what answers of this epoch admitted.
  end_r, total_r, untold_r, had_r, end_t, total_t, untold_t, had_t
  = struct.unpack('<ddddddddddddddddddddddd', ARGV[2])

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lost = 0

-- A window begins where the last is over; one that lies ahead of a clock that
-- went back goes on. What a caller has seen used and the server has not was lost
-- by a restart or a failover: it is counted again. What only the refused were told
-- may have been taken back since; it is, where the window has no count at all.
if window_r > 0 then
  local till, least = now - now % window_r + window_r, used_r
  if at_r < till then at_r, requests, least = till, 0, heard_r end
  if at_r == seen_r and requests < least then requests, lost = least, 1 end
end
-- Tokens go down too, by being settled; so only a value that is not there at all
-- is known to be lost.
if window_t > 0 then
  local till = now - now % window_t + window_t
  if at_t < till then at_t, tokens = till, 0 end
  if not value and at_t == seen_t and tokens < used_t then tokens, lost = used_t, 1 end
end

-- The ledger:
local
  -- the account that it is of; version and closed epoch of the last statement that
  -- was taken; the ends of the windows that it is about;
  owner, taken, shut, ledger_r, ledger_t,
  -- what the count holds by statements;
  stated_r, stated_t,
  -- requests in the count that are nobody's: late questions made them;
  spare,
  -- the count before and after the caller's last run of reservations and statements;
  from, to,
  -- the newest epoch that is not closed, and what the count holds of it; the one
  -- before, if that is not closed either.
  new, new_r, new_t, old, old_r, old_t
  = 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0

-- stated returns what a statement about the window that ends at till says of the one
-- that runs, which ends at at: of an earlier one, nothing; of a later one, what is
-- counted already.
local function stated(till, total, at, counted)
  if till > at then return counted end
  return till == at and total or 0
end

-- take puts the count right by the statement: the difference between what it says
-- and what the count holds is added, or taken back.
local function take()
  local counted_r, counted_t = stated_r, stated_t
  if old <= closed then
    counted_r, counted_t, old, old_r, old_t = counted_r + old_r, counted_t + old_t, 0, 0, 0
  end
  if new <= closed then
    counted_r, counted_t, new, new_r, new_t = counted_r + new_r, counted_t + new_t, 0, 0, 0
  end
  if acknowledged > taken then -- the ledger was lost, and what it held is in the count
    counted_r = math.max(counted_r, stated(end_r, total_r - untold_r, at_r, counted_r))
    counted_t = math.max(counted_t, stated(end_t, total_t - untold_t, at_t, counted_t))
  end
  stated_r = stated(end_r, total_r, at_r, counted_r)
  stated_t = stated(end_t, total_t, at_t, counted_t)
  tokens = math.max(tokens + stated_t - counted_t, 0)

  -- A request can't simply be taken back: somebody may have been told by now that
  -- less remains. It stands for the next one that is stated.
  spare = spare + counted_r - stated_r
  if spare < 0 then
    if to == requests then to = requests - spare end -- nobody is told by the server of these
    requests, spare = requests - spare, 0
  end
  -- But where none but the caller reserved since, and nothing in epochs that are
  -- open, all who were told anything are known: it has seen the last of them.
  if spare > 0 and to == requests and old_r + new_r == 0 and seen_r <= at_r then
    local least = math.max(from, seen_r == at_r and used_r or 0)
    local back = math.max(math.min(spare, requests - least), 0)
    requests, spare, to = requests - back, spare - back, to - back
  end
  taken, shut = version, closed
end

local layout, size = '<dddddddddddddddd', 16 * 8
local packed = nil
if epoch > 0 then
  packed = redis.pcall('GET', KEYS[2])
  if type(packed) == 'string' and #packed == size then
    owner, taken, shut, ledger_r, ledger_t, stated_r, stated_t, spare, from, to,
      new, new_r, new_t, old, old_r, old_t = struct.unpack(layout, packed)
  end
  -- Of an earlier process, or nobody's; or the count that it is of is lost.
  if owner ~= account or not value then
    owner, taken, shut, ledger_r, ledger_t, new, old = account, 0, 0, 0, 0, 0, 0
  end
  if ledger_r ~= at_r then
    ledger_r, stated_r, new_r, old_r, spare, from, to = at_r, 0, 0, 0, 0, 0, 0
  end
  if ledger_t ~= at_t then ledger_t, stated_t, new_t, old_t = at_t, 0, 0, 0 end
  -- The caller no longer waits for an answer, and has said how the question ended.
  if epoch <= shut then return {3, at_r, requests, at_t, tokens, now, 0} end
end

local before_r, before_t = requests, tokens
if epoch > 0 then
  -- A statement that is older than the last one taken says nothing new, whenever it
  -- comes. The same one changes nothing, unless its window has begun since.
  if version >= taken then take() end
  -- At most two epochs are not closed. What a ledger that was lost held of the
  -- newest, the caller knows.
  if epoch > new then
    if new > 0 then old, old_r, old_t = new, old_r + new_r, old_t + new_t end
    new, new_r, new_t = epoch, 0, 0
  elseif epoch < new then
    old = math.max(old, epoch)
  end
  if epoch == new and end_r == at_r then new_r = math.max(new_r, had_r) end
  if epoch == new and end_t == at_t then new_t = math.max(new_t, had_t) end
end

local refused, one = 0, 0
if window_r > 0 then one = 1 end
if window_t == 0 then cost = 0 end
if window_r > 0 and requests >= limit_r then
  refused = 1
elseif window_t > 0 and tokens + cost > limit_t then
  refused = 2
else
  if to ~= requests then from = requests end
  requests, tokens = requests + one, tokens + cost
  to = requests
  if epoch == new then
    new_r, new_t = new_r + one, new_t + cost
  else
    old_r, old_t = old_r + one, old_t + cost
  end
end
if refused == 0 or lost == 1 or requests ~= before_r or tokens ~= before_t then
  write(KEYS[1], string.format('%.0f %.0f %.0f %.0f', at_r, requests, at_t, tokens))
end
if epoch > 0 then
  local packed_now = struct.pack(layout, owner, taken, shut, ledger_r, ledger_t, stated_r, stated_t,
    spare, from, to, new, new_r, new_t, old, old_r, old_t)
  if packed_now ~= packed then write(KEYS[2], packed_now) end
end
return {refused, at_r, requests, at_t, tokens, now, lost}
