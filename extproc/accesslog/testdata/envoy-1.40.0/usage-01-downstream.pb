


edge-1fairlead.downstream“

Ð
	127.0.0.1ô¦
	127.0.0.1á½*ñ±²ØÀ”Ú·2ôŠ: æ™Bƒù™Jª•¶R…ÕÃZ–Ábµ‰Öj
	127.0.0.1›Žr
	127.0.0.1´ªzaŠ´
¨
fairlead.log—
$
decision1795987697386-007-0001

plan2a2e85f7a0acc72f

reason
weighted
&

request_id1795987697386-007-0001

strategy	dynamic
-
fairlead.peek

modelm

stream 
.
fairlead.served

host127.0.0.1:34587
>
fairlead.steer,
*
hosts!127.0.0.1:34587,127.0.0.1:34587h
envoy.ai.token_usageP
/type.googleapis.com/envoy.data.ai.v3.TokenUsagem"*2
BHšchat¢
	127.0.0.1ô¦²
tokens_cached4²
	tokens_in11²

tokens_out7º©Ã×ÀÒ1795987697386-007-0001èØð¬øó€øˆ˜http127.0.0.1:40673*/v1/chat/completions2Go-http-client/1.1B	192.0.2.2J1795987697386-007-0001X¿`j&
x-request-id1795987697386-007-0001p²xg"
Èœ‹2via_upstream8W@º