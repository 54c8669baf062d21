#!lua name=@LIBRARY@
-- The ownership map, on the server's side. Every function takes KEYS[1] = P, the fleet's key prefix, a bare hash tag:
-- all keys of a fleet share one cluster slot.
--
--   P m           hash    member -> expiry (ms) double | epoch double | slot u16 | kind u8 | record   (big-endian)
--   P e           string  the last epoch given out; also after a loss of all keys none is ever given out twice
--   P s           set     slots in use: of live members, and of ended ones until they are swept
--   P d           set     slots of ended members, to be swept
--   P k           hash    slot -> writes taken from that incarnation. A server that lags behind what it once confirmed (a
--                         replica promoted in a failover) shows here, and fences who wrote more
--   P x           hash    not used here: figures of the fleet's ingress processes
--   P b HASH      string  who holds the block: sorted entries of 4 bytes, owner slot | claimant slot.
--                         claimant 0: the owner's KV events say so; else: that router expects it to be computed there
--   P w SLOT      list    journal of what the member in that slot wrote: entry | hash | hash ...  (the sweeper undoes it)
--   P o SLOT      list    the journal before it was turned; gone once all that still holds has been written again
--
-- A hash is 16 bytes and is never turned into a number.

local HEADER = '>ddHB'
local HASH_BYTES = 16
local MAX_SLOT = 65535

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function slot_key(slot)
  return struct.pack('>H', slot)
end

local function end_member(p, member, slot)
  redis.call('HDEL', p .. 'm', member)
  redis.call('SADD', p .. 'd', slot_key(slot))
end

-- The member's slot, or nil where this epoch is not its current one.
local function slot_of(p, member, epoch)
  local record = redis.call('HGET', p .. 'm', member)
  if not record then return nil end
  local _, current, slot = struct.unpack(HEADER, record)
  if current ~= tonumber(epoch) then return nil end
  return slot
end

-- The same where this server also has all writes that the member was told are done.
local function slot_with(p, member, epoch, writes)
  local slot = slot_of(p, member, epoch)
  if slot and tonumber(redis.call('HGET', p .. 'k', slot_key(slot)) or 0) == tonumber(writes) then return slot end
  return nil
end

local function put_member(p, member, epoch, slot, kind, record, lease_ms)
  local header = struct.pack(HEADER, now_ms() + tonumber(lease_ms), epoch, slot, tonumber(kind))
  redis.call('HSET', p .. 'm', member, header .. record)
end

local function find_entry(entries, entry)
  for i = 1, #entries, 4 do
    local here = string.sub(entries, i, i + 3)
    if here == entry then return i, true end
    if here > entry then return i, false end
  end
  return #entries + 1, false
end

local function drop(key, entry)
  local call, sub = redis.call, string.sub
  local entries = call('GET', key)
  if not entries then return end
  local at, found = find_entry(entries, entry)
  if not found then return end
  if #entries == 4 then
    call('DEL', key)
  else
    call('SET', key, sub(entries, 1, at - 1) .. sub(entries, at + 4))
  end
end

local function put(key, entry)
  local call, sub = redis.call, string.sub
  local entries = call('GET', key)
  if not entries then
    call('SET', key, entry)
    return
  end
  local at, found = find_entry(entries, entry)
  if not found then call('SET', key, sub(entries, 1, at - 1) .. entry .. sub(entries, at)) end
end

-- An epoch is the time in milliseconds, or more, so that a server that lost or forgot some gives out none again.
local function next_epoch(p)
  local epoch, now = redis.call('INCR', p .. 'e'), now_ms()
  if epoch < now then
    epoch = now
    redis.call('SET', p .. 'e', string.format('%d', epoch))
  end
  return epoch
end

-- ARGV: member, kind, record, lease (ms). Returns {slot, epoch as string}.
local function join(keys, args)
  local p, member = keys[1], args[1]
  local call = redis.call
  local previous = call('HGET', p .. 'm', member)
  if previous then
    local _, _, slot = struct.unpack(HEADER, previous)
    end_member(p, member, slot)
  end
  if call('SCARD', p .. 's') >= MAX_SLOT then return redis.error_reply('FULL every slot is in use or waits to be swept') end
  local epoch, slot, packed, orphaned
  repeat
    epoch = next_epoch(p)
    slot = (epoch - 1) % MAX_SLOT + 1
    packed = slot_key(slot)
    -- Where the set of slots was lost, a journal still tells of blocks that must be swept before their slot is used.
    orphaned = call('EXISTS', p .. 'w' .. packed, p .. 'o' .. packed) > 0
    if orphaned then call('SADD', p .. 's', packed) end
  until call('SADD', p .. 's', packed) == 1 and not orphaned
  call('HSET', p .. 'k', packed, 0)
  put_member(p, member, epoch, slot, args[2], args[3], args[4])
  return {slot, string.format('%d', epoch)}
end

-- ARGV: member, epoch.
local function leave(keys, args)
  local slot = slot_of(keys[1], args[1], args[2])
  if slot then end_member(keys[1], args[1], slot) end
  return redis.status_reply('OK')
end

-- The member's slot after the changes from args[first] on, for each: owner slot (2 bytes), hashes removed, hashes added.
-- args: member, epoch, number of this write (from 1; the last one may be repeated). Without a change: number of the last one.
-- nil where the member is fenced.
local function apply(p, args, first)
  local sub, call = string.sub, redis.call
  local number = tonumber(args[3])
  if #args < first then return slot_with(p, args[1], args[2], number) end
  local slot = slot_with(p, args[1], args[2], number - 1) or slot_with(p, args[1], args[2], number)
  if not slot then return nil end
  local own = slot_key(slot)
  call('HSET', p .. 'k', own, number)
  for i = first, #args, 3 do
    local owner, removed, added = args[i], args[i + 1], args[i + 2]
    local entry = owner .. (owner == own and '\0\0' or own)
    for j = 1, #removed, HASH_BYTES do
      drop(p .. 'b' .. sub(removed, j, j + HASH_BYTES - 1), entry)
    end
    for j = 1, #added, HASH_BYTES do
      put(p .. 'b' .. sub(added, j, j + HASH_BYTES - 1), entry)
    end
    if #added > 0 then call('RPUSH', p .. 'w' .. own, entry .. added) end
  end
  return slot
end

-- ARGV: member, epoch, number, changes (see `apply`).
local function write(keys, args)
  if not apply(keys[1], args, 4) then return redis.error_reply('FENCED') end
  return redis.status_reply('OK')
end

-- ARGV: member, epoch, number, kind, record, lease (ms), changes (see `apply`).
local function renew(keys, args)
  local slot = apply(keys[1], args, 7)
  if not slot then return redis.error_reply('FENCED') end
  put_member(keys[1], args[1], tonumber(args[2]), slot, args[4], args[5], args[6])
  return redis.status_reply('OK')
end

-- ARGV: member, epoch, "1" when all that still holds has been written again. A journal only grows; turning it keeps it in
-- proportion to what the member holds.
local function turn_journal(keys, args)
  local p, call = keys[1], redis.call
  local slot = slot_of(p, args[1], args[2])
  if not slot then return redis.error_reply('FENCED') end
  local journal, old = p .. 'w' .. slot_key(slot), p .. 'o' .. slot_key(slot)
  if args[3] == '1' then
    call('UNLINK', old)
  elseif call('EXISTS', journal) == 1 and call('EXISTS', old) == 0 then
    call('RENAME', journal, old)
  end
  return redis.status_reply('OK')
end

-- ARGV: member, epoch, hashes. Returns those of them that the map doesn't list as the member's own, in one string.
local function missing(keys, args)
  local p, sub, call = keys[1], string.sub, redis.call
  local slot = slot_of(p, args[1], args[2])
  if not slot then return redis.error_reply('FENCED') end
  local entry, gone = slot_key(slot) .. '\0\0', {}
  for j = 1, #args[3], HASH_BYTES do
    local hash = sub(args[3], j, j + HASH_BYTES - 1)
    local entries = call('GET', p .. 'b' .. hash)
    local _, found = find_entry(entries or '', entry)
    if not found then gone[#gone + 1] = hash end
  end
  return table.concat(gone)
end

-- ARGV: the chain, 16 bytes a block. Returns {now (ms), members, changes flat}; a change is {depth, entries}: the
-- blocks up to this depth, back to the change before, are held by exactly these.
--
-- Everyone's holdings are prefix-closed, so the entries only shrink along the chain (or a claim takes over from an
-- event), and equal ends mean an equal middle: with k distinct depths this reads O(k log n) keys.
local function look_up(keys, args)
  local call, sub, floor = redis.call, string.sub, math.floor
  local p, chain = keys[1], args[1]
  local prefix, n = p .. 'b', #chain / HASH_BYTES
  local changes, len = {}, 0

  local function entries(i)
    return call('GET', prefix .. sub(chain, (i - 1) * HASH_BYTES + 1, i * HASH_BYTES)) or ''
  end
  local function narrow(low, at_low, high, at_high)
    if high - low == 1 then
      changes[len + 1], changes[len + 2] = low, at_low
      len = len + 2
      return
    end
    local middle = floor((low + high) / 2)
    local at_middle = entries(middle)
    if at_middle ~= at_low then narrow(low, at_low, middle, at_middle) end
    if at_middle ~= at_high then narrow(middle, at_middle, high, at_high) end
  end

  if n > 0 then
    local first = entries(1)
    if first ~= '' then narrow(1, first, n + 1, '') end
  end
  return {tostring(now_ms()), call('HVALS', p .. 'm'), changes}
end

-- Returns {now (ms), members with their names, flat}.
local function members(keys)
  return {tostring(now_ms()), redis.call('HGETALL', keys[1] .. 'm')}
end

-- ARGV: most blocks to handle (a little more may be done), milliseconds after which a lapsed lease is over for good.
-- Returns how many blocks were handled.
local function sweep(keys, args)
  local p, call, sub = keys[1], redis.call, string.sub
  local most, over = tonumber(args[1]), now_ms() - tonumber(args[2])
  local members, live = call('HGETALL', p .. 'm'), {}
  for i = 1, #members, 2 do
    local expiry, _, slot = struct.unpack(HEADER, members[i + 1])
    if expiry < over then end_member(p, members[i], slot) else live[slot_key(slot)] = true end
  end
  -- Members that were lost without an end, as by eviction, end here.
  for _, slot in ipairs(call('SMEMBERS', p .. 's')) do
    if not live[slot] then call('SADD', p .. 'd', slot) end
  end
  local done = 0
  while done < most do
    local slot = call('SRANDMEMBER', p .. 'd')
    if not slot then break end
    local written = call('LPOP', p .. 'o' .. slot) or call('LPOP', p .. 'w' .. slot)
    if written then
      local entry = sub(written, 1, 4)
      for j = 5, #written, HASH_BYTES do
        drop(p .. 'b' .. sub(written, j, j + HASH_BYTES - 1), entry)
        done = done + 1
      end
    else
      call('SREM', p .. 'd', slot)
      call('SREM', p .. 's', slot)
      call('HDEL', p .. 'k', slot)
    end
  end
  return done
end

-- With its memory full a server still takes what frees some, and what keeps members alive: only what adds blocks is refused.
local function always(name, callback)
  redis.register_function{function_name='@LIBRARY@_' .. name, callback=callback, flags={'allow-oom'}}
end

local function reading(name, callback)
  redis.register_function{function_name='@LIBRARY@_' .. name, callback=callback, flags={'no-writes'}}
end

always('join', join)
always('renew', renew)
always('leave', leave)
always('remove', write)
always('turn_journal', turn_journal)
always('sweep', sweep)
reading('look_up', look_up)
reading('members', members)
reading('missing', missing)
redis.register_function('@LIBRARY@_add', write)
redis.register_function('@LIBRARY@_add_and_renew', renew)
