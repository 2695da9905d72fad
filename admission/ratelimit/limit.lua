-- Counts one client's requests and tokens of one limit. KEYS[1] is the count, which
-- all replicas share:
--   "<end of the request window> <requests> <end of the token window> <tokens>"
-- KEYS[2] is the ledger of the replica that asks: what of that count is its doing.
-- Ends are in ms since the Unix epoch by the server's clock, which alone decides
-- in which window a request falls. Works from Redis 6.2 on.

-- load returns the size whole numbers under a key; nil if it holds anything else.
local function load(key, size)
  local value = redis.pcall('GET', key)
  if type(value) ~= 'string' or string.find(value, '[^%d ]') then return nil end
  local numbers = {}
  for n in string.gmatch(value, '%d+') do numbers[#numbers + 1] = tonumber(n) end
  return #numbers == size and numbers or nil
end

local at_r, requests, at_t, tokens = 0, 0, 0, 0
local value = load(KEYS[1], 4) -- what somebody else wrote there counts as nothing, and is replaced
if value then at_r, requests, at_t, tokens = unpack(value) end

local function store(key, numbers)
  redis.call('SET', key, string.format(string.rep('%.0f ', #numbers - 1) .. '%.0f', unpack(numbers)),
    'PXAT', string.format('%.0f', math.max(at_r, at_t)))
end

if ARGV[1] == 'settle' then
  -- end of the token window, difference
  if not value or at_t ~= tonumber(ARGV[2]) then return 0 end
  tokens = math.max(tokens + tonumber(ARGV[3]), 0)
  store(KEYS[1], {at_r, requests, at_t, tokens})
  return 1
end

-- reserve: request limit and window, token limit and window (0: no limit), cost;
local limit_r, window_r = tonumber(ARGV[2]), tonumber(ARGV[3])
local limit_t, window_t = tonumber(ARGV[4]), tonumber(ARGV[5])
local cost = tonumber(ARGV[6])
-- the ends of the windows of which the caller has seen something used, and what;
local seen_r, used_r = tonumber(ARGV[7]), tonumber(ARGV[8])
local seen_t, used_t = tonumber(ARGV[9]), tonumber(ARGV[10])
-- and the caller's statement. Its account's number; this question's epoch, 0 if the
-- caller keeps no account of the client; the last epoch of which it knows how each
-- question ended; the statement's version; the last version that was acknowledged.
local account, epoch, closed = tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13])
local version, acknowledged = tonumber(ARGV[14]), tonumber(ARGV[15])
-- Of requests and of tokens: the end of the window that it is about; all that the
-- caller admitted, alone or by answers of closed epochs; what of that it admitted
-- alone and no answer has acknowledged; what answers of this epoch admitted.
local end_r, total_r, untold_r, had_r = tonumber(ARGV[16]), tonumber(ARGV[17]), tonumber(ARGV[18]), tonumber(ARGV[19])
local end_t, total_t, untold_t, had_t = tonumber(ARGV[20]), tonumber(ARGV[21]), tonumber(ARGV[22]), tonumber(ARGV[23])

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lost = 0

-- A window begins where the last is over; one that lies ahead of a clock that
-- went back goes on. What a caller has seen used and the server has not was lost
-- by a restart or a failover: it is counted again.
if window_r > 0 then
  local till = now - now % window_r + window_r
  if at_r < till then at_r, requests = till, 0 end
  if at_r == seen_r and requests < used_r then requests, lost = used_r, 1 end
end
-- Tokens go down too, by being settled; so only a value that is not there at all
-- is known to be lost.
if window_t > 0 then
  local till = now - now % window_t + window_t
  if at_t < till then at_t, tokens = till, 0 end
  if not value and at_t == seen_t and tokens < used_t then tokens, lost = used_t, 1 end
end

-- The ledger, as it lies in the server:
--   account, version, closed: of the last statement that was taken
--   end_r, end_t:        the windows that it is about
--   stated_r, stated_t:  what the count holds by statements
--   spare:               requests in the count that were nobody's: of late questions
--   from, to, run:       the caller's last run of reservations: the count before it
--                        and after it, and its last epoch
--   new, new_r, new_t:   an epoch that is not closed, and what the count holds of it
--   old, old_r, old_t:   the one before, if that is not closed either
local fields = {'account', 'version', 'closed', 'end_r', 'end_t', 'stated_r', 'stated_t',
  'spare', 'from', 'to', 'run', 'new', 'new_r', 'new_t', 'old', 'old_r', 'old_t'}
local l = {}

local function open_ledger()
  local numbers = load(KEYS[2], #fields)
  if numbers and numbers[1] ~= account then numbers = nil end -- of an earlier process
  for i, name in ipairs(fields) do l[name] = numbers and numbers[i] or 0 end
  l.account = account
  if l.end_r ~= at_r then
    l.end_r, l.stated_r, l.new_r, l.old_r = at_r, 0, 0, 0
    l.spare, l.from, l.to, l.run = 0, 0, 0, 0
  end
  if l.end_t ~= at_t then l.end_t, l.stated_t, l.new_t, l.old_t = at_t, 0, 0, 0 end
end

-- stated is what a statement about the window that ends at till says of the one
-- that runs: of an earlier window, nothing; of a later one, what is counted already.
local function stated(till, total, at, counted)
  if till > at then return counted end
  return till == at and total or 0
end

-- take puts the count right by the statement: the difference between what it says
-- and what the count holds is added, or taken back. A statement that is older than
-- the last one taken says nothing new, whenever it comes.
local function take()
  if version < l.version then return false end
  local spare, held_r, held_t = l.spare, requests, tokens
  local counted_r, counted_t = l.stated_r, l.stated_t
  for _, e in ipairs({'old', 'new'}) do
    if l[e] <= closed then
      counted_r, counted_t = counted_r + l[e .. '_r'], counted_t + l[e .. '_t']
      l[e], l[e .. '_r'], l[e .. '_t'] = 0, 0, 0
    end
  end
  if acknowledged > l.version then -- the ledger was lost, and what it held is in the count
    counted_r = math.max(counted_r, stated(end_r, total_r - untold_r, at_r, counted_r))
    counted_t = math.max(counted_t, stated(end_t, total_t - untold_t, at_t, counted_t))
  end
  l.stated_r = stated(end_r, total_r, at_r, counted_r)
  l.stated_t = stated(end_t, total_t, at_t, counted_t)
  tokens = math.max(tokens + l.stated_t - counted_t, 0)

  -- A request can't simply be taken back: somebody may have been told by now that
  -- less remains. It stands for the next one that is stated.
  l.spare = l.spare + counted_r - l.stated_r
  if l.spare < 0 then requests, l.spare = requests - l.spare, 0 end
  -- But where none but the caller reserved since, and only in epochs that are
  -- closed, all who were told anything are known: it has seen the last of them.
  if l.spare > 0 and l.to == requests and l.run <= closed and seen_r <= at_r then
    local floor = math.max(l.from, seen_r == at_r and used_r or 0)
    local back = math.max(math.min(l.spare, requests - floor), 0)
    requests, l.spare, l.to = requests - back, l.spare - back, l.to - back
  end
  local news = version > l.version or l.spare ~= spare or requests ~= held_r or tokens ~= held_t
  l.version, l.closed = version, closed
  return news
end

-- enter finds the question's epoch in the ledger. There are at most two that are
-- not closed; what a lost ledger has forgotten of the newest is known to the caller.
local function enter()
  if epoch > l.new then
    if l.new > 0 then l.old, l.old_r, l.old_t = l.new, l.old_r + l.new_r, l.old_t + l.new_t end
    l.new, l.new_r, l.new_t = epoch, 0, 0
  elseif epoch < l.new then
    l.old = math.max(l.old, epoch)
    return 'old'
  end
  if end_r == at_r then l.new_r = math.max(l.new_r, had_r) end
  if end_t == at_t then l.new_t = math.max(l.new_t, had_t) end
  return 'new'
end

local before_r, before_t = requests, tokens
local news, entered = false, nil
if epoch > 0 then
  open_ledger()
  -- The caller no longer waits for an answer, and has said how the question ended.
  if epoch <= l.closed then return {3, at_r, requests, at_t, tokens, now, 0} end
  news = take()
  entered = enter()
end

local refused = 0
if window_r > 0 and requests >= limit_r then
  refused = 1
elseif window_t > 0 and tokens + cost > limit_t then
  refused = 2
else
  if entered then
    if window_r > 0 then
      if l.to ~= requests then l.from, l.run = requests, 0 end
      l.to, l.run = requests + 1, math.max(l.run, epoch)
      l[entered .. '_r'] = l[entered .. '_r'] + 1
    end
    if window_t > 0 then l[entered .. '_t'] = l[entered .. '_t'] + cost end
  end
  if window_r > 0 then requests = requests + 1 end
  if window_t > 0 then tokens = tokens + cost end
end
if refused == 0 or lost == 1 or requests ~= before_r or tokens ~= before_t then
  store(KEYS[1], {at_r, requests, at_t, tokens})
end
if entered and (refused == 0 or news) then
  local numbers = {}
  for i, name in ipairs(fields) do numbers[i] = l[name] end
  store(KEYS[2], numbers)
end
return {refused, at_r, requests, at_t, tokens, now, lost}
